/* What the kernels in bfloat16 share; it travels as its bits. */

#include <immintrin.h>
#include <stdint.h>

#define LOG2_E 1.44269504f

typedef uint16_t bf16;

static inline __m512 widen(__m256i x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

static inline __m512 load(const bf16 *x) { return widen(_mm256_loadu_si256((const __m256i *)x)); }

/* To the nearest, ties to even; a NaN stays one. */
static inline __m256i narrow(__m512 x) {
#ifdef __AVX512BF16__
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i near = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(near, nan, _mm512_set1_epi32(0x7fc00000)), 16));
#endif
}

static inline void store(bf16 *y, __m512 x) { _mm256_storeu_si256((__m256i *)y, narrow(x)); }

static inline __m512 rounded(__m512 x) { return widen(narrow(x)); }

/* 2 ** x to 3e-7, by a polynomial that interpolates it at Chebyshev's points of [-0.5, 0.5]. */
static inline __m512 exp2_of(__m512 x) {
  __m512 whole = _mm512_roundscale_ps(x, 0), part = _mm512_sub_ps(x, whole);
  __m512 y = _mm512_set1_ps(1.34004e-3f);
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(9.67604e-3f));
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(5.550327e-2f));
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(2.4022107e-1f));
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(6.9314721e-1f));
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(1.00000008f));
  return _mm512_scalef_ps(y, whole);
}

/* 16 by 16 of 32 bits. */
static inline void transpose(__m512i r[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int k = 0; k < 2; k++) {
      r[i + 2 * k] = _mm512_unpacklo_epi64(t[i + k], t[i + k + 2]);
      r[i + 2 * k + 1] = _mm512_unpackhi_epi64(t[i + k], t[i + k + 2]);
    }
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 16; k += 8) {
      t[i + k] = _mm512_shuffle_i32x4(r[i + k], r[i + k + 4], 0x88);
      t[i + k + 4] = _mm512_shuffle_i32x4(r[i + k], r[i + k + 4], 0xdd);
    }
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 8; k += 4) {
      r[i + k] = _mm512_shuffle_i32x4(t[i + k], t[i + k + 8], 0x88);
      r[i + k + 8] = _mm512_shuffle_i32x4(t[i + k], t[i + k + 8], 0xdd);
    }
}

#ifdef __AMX_BF16__

/* Tiles are 16 rows of 64 bytes. */
static inline void take_tiles(void) {
  struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } config = {.palette = 1};
  for (int t = 0; t < 8; t++) config.row_bytes[t] = 64, config.rows[t] = 16;
  _tile_loadconfig(&config);
}

static inline void leave_tiles(void) { _tile_release(); }

#else

static inline void take_tiles(void) {}
static inline void leave_tiles(void) {}

/* Two bfloat16 lie in 32 bits: a shift makes floats of the lower ones, a mask of the upper. */
static inline __m512 lower(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }

static inline __m512 upper(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(0xffff0000)));
}

#endif
