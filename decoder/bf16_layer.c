/* Llama's decoder layer in bfloat16, rounded where transformers rounds, and that of EAGLE-3. Called by
   bf16_layer.py.

   Legend: T tokens, D head size. */

#include "bf16_kernels.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
  const bf16 *weight; /* as specdepth_bf16_pack leaves it */
  const float *bias;  /* or null */
  int64_t num_outputs, num_inputs;
} Linear;

typedef struct {
  Linear qkv, out, gate_up, down;
  const bf16 *input_norm, *post_norm; /* [hidden] */
  const bf16 *beside_norm;            /* of what the projections see before the input (EAGLE-3), or null */
  float input_epsilon, post_epsilon, beside_epsilon, scale;
  int64_t num_heads, num_kv_heads, head_dim;
} Layer;

/* RMSNorm of rows x [T, width], `stride` apart, to y, `y_stride` apart; width a multiple of 16. */
void specdepth_bf16_norm(const bf16 *x, int64_t stride, const bf16 *weight, float epsilon, int64_t T, int64_t width,
                         bf16 *y, int64_t y_stride, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1)
  for (int64_t t = 0; t < T; t++) {
    const bf16 *row = x + t * stride;
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += 16) squares = _mm512_fmadd_ps(load(row + i), load(row + i), squares);
    const __m512 scale = _mm512_set1_ps(1 / __builtin_sqrtf(_mm512_reduce_add_ps(squares) / width + epsilon));
    for (int64_t i = 0; i < width; i += 16)
      store(y + t * y_stride + i, _mm512_mul_ps(rounded(_mm512_mul_ps(load(row + i), scale)), load(weight + i)));
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

static void add(bf16 *x, const bf16 *y, int64_t count, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1)
  for (int64_t i = 0; i < count; i += 16) store(x + i, _mm512_add_ps(load(x + i), load(y + i)));
}

static int multiply(const Linear *l, const bf16 *x, int64_t T, bf16 *y, int64_t num_threads) {
  return specdepth_bf16_linear(x, l->num_inputs, l->weight, l->bias, T, l->num_outputs, l->num_inputs, y, num_threads);
}

/* x [T, hidden] to y of the same shape, with keys and values written to `rows` [T] of the pool. `pass` says which
   sequences the tokens are of; cos and sin [T, D] as for `rotate`; `beside` [T, hidden] goes with its norm.
   Returns 0, or 1 without memory. */
int specdepth_bf16_layer(const Layer *l, const Pass *pass, const bf16 *x, const bf16 *beside, int64_t T,
                         const bf16 *cos, const bf16 *sin, bf16 *pool, const int64_t *rows, bf16 *y,
                         int64_t num_threads) {
  const int64_t seen = l->qkv.num_inputs, hidden = l->down.num_outputs, width = l->down.num_inputs, D = l->head_dim;
  const int64_t queries = l->num_heads * D, kv = 2 * l->num_kv_heads * D;
  bf16 *normed = aligned_alloc(64, T * (seen + queries + kv + queries + 3 * width) * sizeof(bf16));
  if (!normed) return 1;
  bf16 *qkv = normed + T * seen, *attended = qkv + T * (queries + kv);
  bf16 *gate_up = attended + T * queries, *gated = gate_up + T * 2 * width;
  Pass p = *pass;
  p.queries = qkv, p.pool = pool, p.out = attended;
  p.token_stride = queries + kv, p.head_stride = D;
  p.num_heads = l->num_heads, p.num_kv_heads = l->num_kv_heads, p.head_dim = D;
  p.window = 0, p.scale = l->scale;

  if (l->beside_norm)
    specdepth_bf16_norm(beside, hidden, l->beside_norm, l->beside_epsilon, T, hidden, normed, seen, num_threads);
  specdepth_bf16_norm(x, hidden, l->input_norm, l->input_epsilon, T, hidden, normed + seen - hidden, seen, num_threads);
  int failed = multiply(&l->qkv, normed, T, qkv, num_threads);
  specdepth_bf16_rotate(qkv, queries + kv, cos, sin, T, l->num_heads + l->num_kv_heads, D, queries, pool, rows, kv,
                        num_threads);
  failed |= specdepth_bf16_attention(&p, num_threads);
  failed |= multiply(&l->out, attended, T, normed, num_threads);
  memcpy(y, x, T * hidden * sizeof(bf16));
  add(y, normed, T * hidden, num_threads);

  specdepth_bf16_norm(y, hidden, l->post_norm, l->post_epsilon, T, hidden, normed, hidden, num_threads);
  failed |= multiply(&l->gate_up, normed, T, gate_up, num_threads);
  specdepth_bf16_gate(gate_up, T, width, gated, num_threads);
  failed |= multiply(&l->down, gated, T, normed, num_threads);
  add(y, normed, T * hidden, num_threads);
  free(normed);
  return failed;
}
