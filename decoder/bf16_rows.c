/* What a round asks of each row of logits in bfloat16: the first largest, and how sure the law is.
   Called by bf16_rows.py.

   Legend: N rows `stride` apart of V columns. */

#include "bf16_common.h"

#include <math.h>

#define CALM 1024 /* columns after which sums in float32 are added up in float64 */

static inline __m512 load_some(const bf16 *x, int64_t count) {
  const __mmask16 there = count < 16 ? (1 << count) - 1 : 0xffff;
  return _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), there, widen(_mm256_maskz_loadu_epi16(there, x)));
}

static inline float largest(const bf16 *row, int64_t V) {
  __m512 top = _mm512_set1_ps(-INFINITY), other = top;
  int64_t v = 0;
  for (; v + 32 <= V; v += 32) {
    top = _mm512_max_ps(top, load(row + v));
    other = _mm512_max_ps(other, load(row + v + 16));
  }
  for (; v < V; v += 16) top = _mm512_max_ps(top, load_some(row + v, V - v));
  return _mm512_reduce_max_ps(_mm512_max_ps(top, other));
}

/* First largest column of each row; 0 in a row of NaN. */
void specdepth_bf16_argmax(const bf16 *logits, int64_t stride, int64_t N, int64_t V, int64_t *ids,
                           int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1)
  for (int64_t n = 0; n < N; n++) {
    const bf16 *row = logits + n * stride;
    const __m512 top = _mm512_set1_ps(largest(row, V));
    __mmask16 found = 0;
    int64_t v = 0;
    for (; v < V; v += 16) {
      found = _mm512_cmp_ps_mask(load_some(row + v, V - v), top, _CMP_EQ_OQ);
      if (found) break;
    }
    ids[n] = found ? v + __builtin_ctz(found) : 0;
  }
}

/* Of each row largest probability, entropy in nats, and largest less second largest probability: out [3, N]. */
void specdepth_bf16_signals(const bf16 *logits, int64_t stride, int64_t N, int64_t V, double *out,
                            int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1)
  for (int64_t n = 0; n < N; n++) {
    const bf16 *row = logits + n * stride;
    __m512 first = _mm512_set1_ps(-INFINITY), second = first;
    for (int64_t v = 0; v < V; v += 16) {
      const __m512 x = load_some(row + v, V - v);
      second = _mm512_max_ps(second, _mm512_min_ps(first, x));
      first = _mm512_max_ps(first, x);
    }
    float best[32], top = -INFINITY, next = -INFINITY;
    _mm512_storeu_ps(best, first), _mm512_storeu_ps(best + 16, second);
    for (int i = 0; i < 32; i++) {
      if (best[i] > top) next = top, top = best[i];
      else if (best[i] > next) next = best[i];
    }
    /* With w = 2 ** x the entropy of w / sum(w) is ln 2 (log2 sum(w) - sum(w x) / sum(w)). */
    const __m512 shift = _mm512_set1_ps(top), scale = _mm512_set1_ps(LOG2_E), least = _mm512_set1_ps(-1e30f);
    double sum = 0, products = 0;
    for (int64_t from = 0; from < V; from += CALM) {
      const int64_t to = from + CALM < V ? from + CALM : V;
      __m512 weights = _mm512_setzero_ps(), weighted = weights;
      for (int64_t v = from; v < to; v += 16) {
        const __m512 x = _mm512_mul_ps(_mm512_sub_ps(load_some(row + v, V - v), shift), scale);
        const __m512 bounded = _mm512_max_ps(x, least), weight = exp2_of(bounded);
        weights = _mm512_add_ps(weights, weight);
        weighted = _mm512_fmadd_ps(weight, bounded, weighted);
      }
      sum += _mm512_reduce_add_ps(weights), products += _mm512_reduce_add_ps(weighted);
    }
    out[n] = 1 / sum;
    out[N + n] = log(sum) - products / sum / LOG2_E;
    out[2 * N + n] = (1 - exp(next - top)) / sum;
  }
}
