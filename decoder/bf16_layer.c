/* The small operations of a Llama layer in bfloat16, each in one call: norm, rotary embedding with the write of
   keys and values, and gating. They round to bfloat16 where transformers does. Called by bf16_layer.py. */

#include "bf16_common.h"

#include <string.h>

/* RMSNorm of rows x [T, width], `stride` apart; width a multiple of 16. */
void specdepth_bf16_norm(const bf16 *x, int64_t stride, const bf16 *weight, float epsilon, int64_t T, int64_t width,
                         bf16 *y, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1)
  for (int64_t t = 0; t < T; t++) {
    const bf16 *row = x + t * stride;
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += 16) squares = _mm512_fmadd_ps(load(row + i), load(row + i), squares);
    const __m512 scale = _mm512_set1_ps(1 / __builtin_sqrtf(_mm512_reduce_add_ps(squares) / width + epsilon));
    for (int64_t i = 0; i < width; i += 16)
      store(y + t * width + i, _mm512_mul_ps(rounded(_mm512_mul_ps(load(row + i), scale)), load(weight + i)));
  }
}

/* Rotate the first `rotated` heads of each token of qkv [T, stride] in place, by cos and sin [T, D], the first
   half of the sines negative; D a multiple of 32. Then copy `width` numbers from `first` on, the token's keys
   and values, to its row of the pool [*, width]. */
void specdepth_bf16_rotate(bf16 *qkv, int64_t stride, const bf16 *cos, const bf16 *sin, int64_t T, int64_t rotated,
                           int64_t D, int64_t first, bf16 *pool, const int64_t *rows, int64_t width,
                           int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1)
  for (int64_t t = 0; t < T; t++) {
    const bf16 *c = cos + t * D, *s = sin + t * D;
    for (int64_t h = 0; h < rotated; h++)
      for (int64_t i = 0, k = D / 2; k < D; i += 16, k += 16) {
        bf16 *low = qkv + t * stride + h * D + i, *high = qkv + t * stride + h * D + k;
        const __m512 a = load(low), b = load(high);
        store(low, _mm512_fmadd_ps(b, load(s + i), rounded(_mm512_mul_ps(a, load(c + i)))));
        store(high, _mm512_fmadd_ps(a, load(s + k), rounded(_mm512_mul_ps(b, load(c + k)))));
      }
    memcpy(pool + rows[t] * width, qkv + t * stride + first, width * sizeof(bf16));
  }
}

/* silu(gate) * up of rows [T, 2 * width], gate first; width a multiple of 16. */
void specdepth_bf16_gate(const bf16 *gate_up, int64_t T, int64_t width, bf16 *y, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1)
  for (int64_t t = 0; t < T; t++)
    for (int64_t i = 0; i < width; i += 16) {
      const __m512 gate = load(gate_up + t * 2 * width + i), up = load(gate_up + t * 2 * width + width + i);
      /* Far below 0 the exponential is infinite and the result -0, as it should be. */
      const __m512 power = exp2_of(_mm512_mul_ps(gate, _mm512_set1_ps(-LOG2_E)));
      const __m512 silu = _mm512_div_ps(gate, _mm512_add_ps(_mm512_set1_ps(1), power));
      store(y + t * width + i, _mm512_mul_ps(rounded(silu), up));
    }
}
