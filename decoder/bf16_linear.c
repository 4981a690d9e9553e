/* y = x W^T + b in bfloat16, for few rows and weights that stream from memory.

   A row's result is the sum over its K products in the same order whatever the number of rows: the same bits in
   every pass. Weights are packed once into the order in which they are read, so that a pass streams them and
   fetches ahead.

   Legend: M rows, N outputs and K inputs, both multiples of 32. Called by bf16_linear.py. */

#include "bf16_kernels.h"

#include <stdlib.h>

#define AHEAD 16384 /* bytes; 4 to 128 kB measured alike */

#ifdef __AMX_BF16__
#include "bf16_linear_amx.h"
#else
#include "bf16_linear_avx512.h"
#endif

/* packed [N / 32][K / 32][2][16][32]: of 32 outputs two tiles of 16, pairs of inputs down, outputs across. */
void specdepth_bf16_pack(const bf16 *weight, int64_t N, int64_t K, bf16 *packed) {
  for (int64_t n = 0; n < N; n += 16)
    for (int64_t k = 0; k < K; k += 32) {
      bf16 *tile = packed + (n / 32 * 32) * K + k * 32 + n % 32 * 32;
      for (int pair = 0; pair < 16; pair++)
        for (int i = 0; i < 32; i++) tile[pair * 32 + i] = weight[(n + i / 2) * K + k + 2 * pair + i % 2];
    }
}

/* x [M, K] with rows `stride` apart, bias [N] or null, y [M, N]. Returns 0, or 1 without memory. */
int specdepth_bf16_linear(const bf16 *x, int64_t stride, const bf16 *packed, const float *bias, int64_t M, int64_t N,
                          int64_t K, bf16 *y, int64_t num_threads) {
  if (!M) return 0;
  const int64_t groups = (M + GROUP - 1) / GROUP;
  packed_row *rows = aligned_alloc(64, groups * GROUP * K * sizeof(packed_row));
  if (!rows) return 1;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    take_tiles();
#pragma omp for schedule(static)
    for (int64_t g = 0; g < groups; g++) pack_rows(x, stride, M, K, g, rows + g * GROUP * K);
#pragma omp for schedule(static)
    for (int64_t n = 0; n < N; n += 32) multiply(rows, packed + n * K, bias ? bias + n : bias, M, N, K, y + n);
    leave_tiles();
  }
  free(rows);
  return 0;
}
