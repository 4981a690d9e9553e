/* What the AMX kernels share: tiles are 16 rows of 64 bytes, and bfloat16 travels as its bits. */

#include <immintrin.h>
#include <stdint.h>

#define LOG2_E 1.44269504f

typedef uint16_t bf16;

static inline void configure_tiles(void) {
  struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } config = {.palette = 1};
  for (int t = 0; t < 8; t++) config.row_bytes[t] = 64, config.rows[t] = 16;
  _tile_loadconfig(&config);
}

/* 2 ** x to 4e-6, which bfloat16 does not see. */
static inline __m512 exp2_of(__m512 x) {
  __m512 whole = _mm512_roundscale_ps(x, 0), part = _mm512_sub_ps(x, whole);
  __m512 y = _mm512_set1_ps(9.61812910e-3f);
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(5.55041086e-2f));
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(2.40226507e-1f));
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(6.93147181e-1f));
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(1.f));
  return _mm512_scalef_ps(y, whole);
}
