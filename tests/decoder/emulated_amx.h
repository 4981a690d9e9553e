/* AMX tiles and the conversions of AVX512-BF16 in plain C, with which the AMX kernels run on a CPU without them.
   Included ahead of a kernel's source by tests/decoder/bf16.py. */

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

static _Thread_local uint8_t emulated_tiles[8][16][64];

static inline float float_of(uint16_t bits) {
  const uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}

static inline uint16_t bf16_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if (value != value) return 0x7fc0;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static inline __m512bh emulated_narrow_two(__m512 high, __m512 low) {
  float in[32];
  uint16_t out[32];
  _mm512_storeu_ps(in, low), _mm512_storeu_ps(in + 16, high);
  for (int i = 0; i < 32; i++) out[i] = bf16_of(in[i]);
  return (__m512bh)_mm512_loadu_si512(out);
}

static inline __m256bh emulated_narrow(__m512 x) {
  return (__m256bh)_mm512_castsi512_si256((__m512i)emulated_narrow_two(x, x));
}

static inline void emulated_load(int tile, const void *from, int64_t stride) {
  for (int row = 0; row < 16; row++) memcpy(emulated_tiles[tile][row], (const char *)from + row * stride, 64);
}

static inline void emulated_store(int tile, void *to, int64_t stride) {
  for (int row = 0; row < 16; row++) memcpy((char *)to + row * stride, emulated_tiles[tile][row], 64);
}

static inline void emulated_multiply(int sums, int left, int right) {
  for (int m = 0; m < 16; m++) {
    float row[16];
    uint16_t a[32], b[32];
    memcpy(row, emulated_tiles[sums][m], 64), memcpy(a, emulated_tiles[left][m], 64);
    for (int pair = 0; pair < 16; pair++) {
      memcpy(b, emulated_tiles[right][pair], 64);
      for (int half = 0; half < 2; half++)
        for (int n = 0; n < 16; n++) row[n] += float_of(a[2 * pair + half]) * float_of(b[2 * n + half]);
    }
    memcpy(emulated_tiles[sums][m], row, 64);
  }
}

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_loadconfig
#undef _tile_release
#undef _mm512_cvtneps_pbh
#undef _mm512_cvtne2ps_pbh
#define _tile_loadd(tile, from, stride) emulated_load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated_store(tile, to, stride)
#define _tile_zero(tile) memset(emulated_tiles[tile], 0, 1024)
#define _tile_dpbf16ps(sums, left, right) emulated_multiply(sums, left, right)
#define _tile_loadconfig(config) ((void)(config))
#define _tile_release() ((void)0)
#define _mm512_cvtneps_pbh(x) emulated_narrow(x)
#define _mm512_cvtne2ps_pbh(high, low) emulated_narrow_two(high, low)
