/* Kernels that others call, besides Python. */

#include "bf16_common.h"

/* One pass of ragged attention. */
typedef struct {
  const bf16 *queries; /* [T, H, D] with the strides below */
  const bf16 *pool;    /* [rows, J * D + J * D] keys, then values of a token */
  const int32_t *tables; /* [N, width] */
  const int64_t *starts, *lens; /* [N] */
  bf16 *out;           /* [T, H, D] */
  int64_t token_stride, head_stride, num_sequences, num_heads, num_kv_heads, head_dim, block_size, width;
  int64_t window; /* 0: none */
  float scale;
} Pass;

int specdepth_bf16_attention(const Pass *p, int64_t num_threads);

int specdepth_bf16_linear(const bf16 *x, int64_t stride, const bf16 *packed, const float *bias, int64_t M, int64_t N,
                          int64_t K, bf16 *y, int64_t num_threads);
