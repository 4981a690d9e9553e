/* Rows and multiplication of bf16_linear.c in AMX tiles, of 16 rows or outputs and 32 inputs. */

#define GROUP 16

typedef bf16 packed_row;

/* Rows as tiles [M / 16][K / 32][16][32], zeros behind the last. */
static void pack_rows(const bf16 *x, int64_t stride, int64_t M, int64_t K, int64_t tile, bf16 *out) {
  for (int64_t k = 0; k < K; k += 32)
    for (int64_t row = tile * 16; row < tile * 16 + 16; row++, out += 32)
      _mm512_store_si512(out, row < M ? _mm512_loadu_si512(x + row * stride + k) : _mm512_setzero_si512());
}

static void store_rows(const float *left, const float *right, const float *bias, int64_t rows, bf16 *y, int64_t N) {
  for (int64_t i = 0; i < rows; i++) {
    __m512 a = _mm512_load_ps(left + i * 16), b = _mm512_load_ps(right + i * 16);
    if (bias) a = _mm512_add_ps(a, _mm512_loadu_ps(bias)), b = _mm512_add_ps(b, _mm512_loadu_ps(bias + 16));
    _mm512_storeu_si512(y + i * N, (__m512i)_mm512_cvtne2ps_pbh(b, a));
  }
}

/* 32 outputs of all rows: two tiles of rows by two of outputs at a time. */
static void multiply(const bf16 *rows, const bf16 *weight, const float *bias, int64_t M, int64_t N, int64_t K,
                     bf16 *y) {
  float sums[4][256] __attribute__((aligned(64)));
  for (int64_t m = 0; m < M; m += 32) {
    const bf16 *upper = rows + m * K, *lower = upper + 16 * K;
    const int two = M - m > 16;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < K; k += 32) {
      const bf16 *w = weight + k * 32;
      if (!m)
        for (int at = 0; at < 2048; at += 64) _mm_prefetch((const char *)w + AHEAD + at, _MM_HINT_T1);
      _tile_loadd(4, upper + k * 16, 64);
      _tile_loadd(6, w, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, w + 512, 64);
      _tile_dpbf16ps(1, 4, 7);
      if (two) {
        _tile_loadd(5, lower + k * 16, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    store_rows(sums[0], sums[1], bias, two ? 16 : M - m, y + m * N, N);
    if (two) {
      _tile_stored(2, sums[2], 64);
      _tile_stored(3, sums[3], 64);
      store_rows(sums[2], sums[3], bias, M - m < 32 ? M - m - 16 : 16, y + (m + 16) * N, N);
    }
  }
}

