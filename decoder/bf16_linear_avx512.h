/* Rows and multiplication of bf16_linear.c with AVX-512, widened to float32 on the way. (The processor's own
   instruction, vdpbf16ps of AVX512-BF16, took 1.5 times as long for 8 rows and more on Sapphire Rapids.) */

#define GROUP 12 /* rows that share a pair of weights; twice as many sums and little else fill the 32 registers */

typedef float packed_row;

/* Rows of a group as [K][rows], an input of all rows after the other. */
static void pack_rows(const bf16 *x, int64_t stride, int64_t M, int64_t K, int64_t group, float *out) {
  const int64_t first = group * GROUP, count = M - first < GROUP ? M - first : GROUP;
  const __mmask16 lanes = (1 << count) - 1;
  for (int64_t k = 0; k < K; k += 16) {
    __m512i r[16];
    for (int64_t i = 0; i < 16; i++)
      r[i] = i < count ? _mm512_castps_si512(load(x + (first + i) * stride + k)) : _mm512_setzero_si512();
    transpose(r);
    for (int64_t i = 0; i < 16; i++, out += count) _mm512_mask_storeu_epi32(out, lanes, r[i]);
  }
}

/* 32 outputs of `count` rows, known when compiled: sums stay in registers. */
static inline __attribute__((always_inline)) void multiply_rows(const int count, const float *rows,
                                                                const bf16 *weight, const float *bias, int64_t N,
                                                                int64_t K, int fetch, bf16 *y) {
  __m512 left[GROUP], right[GROUP];
#pragma GCC unroll 12
  for (int i = 0; i < count; i++) {
    left[i] = bias ? _mm512_loadu_ps(bias) : _mm512_setzero_ps();
    right[i] = bias ? _mm512_loadu_ps(bias + 16) : _mm512_setzero_ps();
  }
  for (int64_t k = 0; k < K; k += 32, weight += 1024) {
#pragma GCC unroll 2
    for (int pair = 0; pair < 16; pair++, rows += 2 * count) {
      /* Spread over the products: all at once they hold up the loads behind them. */
      if (fetch) {
        _mm_prefetch((const char *)weight + AHEAD + pair * 128, _MM_HINT_T1);
        _mm_prefetch((const char *)weight + AHEAD + pair * 128 + 64, _MM_HINT_T1);
      }
      _mm_prefetch(weight + 1024 + pair * 32, _MM_HINT_T0);
      _mm_prefetch(weight + 1536 + pair * 32, _MM_HINT_T0);
      const __m512i a = _mm512_load_si512(weight + pair * 32), b = _mm512_load_si512(weight + 512 + pair * 32);
#pragma GCC unroll 12
      for (int i = 0; i < count; i++) {
        const __m512 x = _mm512_set1_ps(rows[i]);
        left[i] = _mm512_fmadd_ps(x, lower(a), left[i]);
        right[i] = _mm512_fmadd_ps(x, lower(b), right[i]);
      }
#pragma GCC unroll 12
      for (int i = 0; i < count; i++) {
        const __m512 x = _mm512_set1_ps(rows[count + i]);
        left[i] = _mm512_fmadd_ps(x, upper(a), left[i]);
        right[i] = _mm512_fmadd_ps(x, upper(b), right[i]);
      }
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < count; i++) store(y + i * N, left[i]), store(y + i * N + 16, right[i]);
}

/* 32 outputs of all rows. */
static void multiply(const float *rows, const bf16 *weight, const float *bias, int64_t M, int64_t N, int64_t K,
                     bf16 *y) {
  for (int64_t m = 0; m < M; m += GROUP, rows += GROUP * K)
    switch (M - m < GROUP ? M - m : GROUP) {
#define CASE(count) \
  case count: multiply_rows(count, rows, weight, bias, N, K, !m, y + m * N); break;
      CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
    }
}
