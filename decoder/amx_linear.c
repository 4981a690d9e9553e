/* y = x W^T + b in bfloat16 on Intel AMX, for few rows and weights that stream from memory.

   A row's result is the sum over its K products in the same order, 32 at a time, whatever the number of rows:
   the same bits in every pass. Weights are packed once into the tiles that they are read as, one behind
   the other, so that a pass streams them in order and fetches ahead.

   Legend: M rows, N outputs and K inputs, both multiples of 32. Called by amx_linear.py. */

#include "amx_common.h"

#include <stdlib.h>

#define AHEAD 16384 /* bytes; 4 to 128 kB measured alike */

/* packed [N / 32][K / 32][2][16][32]: of 32 outputs two tiles of 16, pairs of inputs down, outputs across. */
void specdepth_amx_pack(const bf16 *weight, int64_t N, int64_t K, bf16 *packed) {
  for (int64_t n = 0; n < N; n += 16)
    for (int64_t k = 0; k < K; k += 32) {
      bf16 *tile = packed + (n / 32 * 32) * K + k * 32 + n % 32 * 32;
      for (int pair = 0; pair < 16; pair++)
        for (int i = 0; i < 32; i++) tile[pair * 32 + i] = weight[(n + i / 2) * K + k + 2 * pair + i % 2];
    }
}

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

/* x [M, K] with rows `stride` apart, bias [N] or null, y [M, N]. Returns 0, or 1 without memory. */
int specdepth_amx_linear(const bf16 *x, int64_t stride, const bf16 *packed, const float *bias, int64_t M, int64_t N,
                         int64_t K, bf16 *y, int64_t num_threads) {
  if (!M) return 0;
  const int64_t tiles = (M + 15) / 16;
  bf16 *rows = aligned_alloc(64, tiles * 16 * K * sizeof(bf16));
  if (!rows) return 1;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    configure_tiles();
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tiles; t++) pack_rows(x, stride, M, K, t, rows + t * 16 * K);
#pragma omp for schedule(static)
    for (int64_t n = 0; n < N; n += 32) multiply(rows, packed + n * K, bias ? bias + n : bias, M, N, K, y + n);
    _tile_release();
  }
  free(rows);
  return 0;
}
