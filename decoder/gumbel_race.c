/* The race of `sampling.gumbel_argmax`: argmin over ids with p > 0 of -log(u(key, id)) / p[id] in float64,
   ties to the lowest id. u is the keyed uniform of sampling.py, to the bit.

   Eight ids are hashed at a time, and few need a logarithm: -log(u) >= 1 - u, so that an id whose 1 - u
   exceeds best * p has lost. The logarithm may differ from torch's in the last bit, hence the winner too,
   where two arrival times agree to 1e-16. Built by gumbel_race.py. */

#include <immintrin.h>
#include <math.h>
#include <stdint.h>

#define GOLDEN 0x9E3779B97F4A7C15u
#define MIX_1 0xBF58476D1CE4E5B9u
#define MIX_2 0x94D049BB133111EBu
#define CELLS 0x1p52 /* u is the middle of one of so many cells of (0, 1) */
#define LANES 8

/* Output function of SplitMix64. */
static inline __m512i mix(__m512i bits) {
  bits = _mm512_xor_si512(bits, _mm512_srli_epi64(bits, 30));
  bits = _mm512_mullo_epi64(bits, _mm512_set1_epi64(MIX_1));
  bits = _mm512_xor_si512(bits, _mm512_srli_epi64(bits, 27));
  bits = _mm512_mullo_epi64(bits, _mm512_set1_epi64(MIX_2));
  return _mm512_xor_si512(bits, _mm512_srli_epi64(bits, 31));
}

/* Winner of one row; the last id where no weight is above 0. */
static inline __attribute__((always_inline)) int64_t race(const void *row, int64_t vocab_size, int64_t key,
                                                          int is_double) {
  const __m512i lanes = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0), golden = _mm512_set1_epi64(GOLDEN);
  const __m512i stride = _mm512_set1_epi64(LANES * GOLDEN);
  __m512i state = _mm512_add_epi64(_mm512_mullo_epi64(lanes, golden), _mm512_set1_epi64(key));
  __m512d limit = _mm512_set1_pd(INFINITY);
  double best = INFINITY;
  int64_t winner = -1;
  for (int64_t at = 0; at < vocab_size; at += LANES, state = _mm512_add_epi64(state, stride)) {
    __mmask8 valid = vocab_size - at < LANES ? (1 << (vocab_size - at)) - 1 : 255;
    __m512d p = is_double ? _mm512_maskz_loadu_pd(valid, (const double *)row + at)
                          : _mm512_cvtps_pd(_mm512_castps512_ps256(
                                _mm512_maskz_loadu_ps(valid, (const float *)row + at)));
    __mmask8 open = _mm512_cmp_pd_mask(p, _mm512_setzero_pd(), _CMP_GT_OQ);
    if (!open) continue;
    __m512i bits = mix(state);
    /* The cell counted from above is half a cell less than 1 - u, and so at least 1e-8 of itself less than
       -log(u): more than the roundings of the product, the logarithm and the division together. */
    __m512d gap = _mm512_cvtepu64_pd(_mm512_srli_epi64(_mm512_xor_si512(bits, _mm512_set1_epi64(-1)), 12));
    open = _mm512_mask_cmp_pd_mask(open, gap, _mm512_mul_pd(limit, p), _CMP_NGT_UQ);
    if (!open) continue;
    uint64_t lane_bits[LANES];
    double lane_p[LANES];
    _mm512_storeu_si512(lane_bits, bits);
    _mm512_storeu_pd(lane_p, p);
    for (unsigned left = open; left; left &= left - 1) {
      int lane = __builtin_ctz(left);
      double time = -log(((double)(lane_bits[lane] >> 12) + 0.5) / CELLS) / lane_p[lane];
      /* Weights so small that the time is infinite still beat those of 0. */
      if (time < best || winner < 0) best = time, winner = at + lane;
    }
    limit = _mm512_set1_pd(best * CELLS);
  }
  return winner < 0 ? vocab_size - 1 : winner;
}

/* weights: [num_rows, vocab_size] float or double, rows `row_stride` entries apart. keys, ids: [num_rows]. */
void specdepth_gumbel_race(const void *weights, int64_t is_double, int64_t row_stride, int64_t num_rows,
                           int64_t vocab_size, const int64_t *keys, int64_t *ids, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1)
  for (int64_t r = 0; r < num_rows; r++)
    ids[r] = is_double ? race((const double *)weights + r * row_stride, vocab_size, keys[r], 1)
                       : race((const float *)weights + r * row_stride, vocab_size, keys[r], 0);
}
