/* The products of bf16_attention.c with AVX-512: scores with keys across, weighted values with dimensions across,
   so that work goes by the queries that a tile really has. */

#define ROWS 8 /* queries that share a pair of keys or values; twice as many sums fit the registers */

typedef float packed;

typedef struct {
  uint32_t *keys; /* [CHUNK / 32, D / 2, 32] pairs of dimensions down, keys across */
  float *scores;  /* [16, CHUNK], then their exponentials */
} Chunk;

#define CHUNK_SIZES CHUNK * D * 2, CHUNK * 64
#define CHUNK_PARTS(c) (void **)&c.keys, (void **)&c.scores

#define BY_ROWS(count, call)                                                                        \
  switch (count) {                                                                                  \
    case 1: call(1); break; case 2: call(2); break; case 3: call(3); break; case 4: call(4); break; \
    case 5: call(5); break; case 6: call(6); break; case 7: call(7); break; default: call(8);       \
  }

/* [16, D] */
static void pack_queries(const __m512i r[16], int64_t d, int64_t D, float *out) {
  for (int i = 0; i < 16; i++) {
    _mm512_store_ps(out + i * D + d, widen(_mm512_castsi512_si256(r[i])));
    _mm512_store_ps(out + i * D + d + 16, widen(_mm512_extracti64x4_epi64(r[i], 1)));
  }
}

static void pack_chunk(const Pass *p, const bf16 *const *blocks, int64_t num_pairs, int64_t j, Ahead *ahead,
                       Chunk *c) {
  const int64_t D = p->head_dim, stride = 2 * p->num_kv_heads * D;
  for (int64_t b = 0; b < 2 * num_pairs; b++)
    for (int64_t d = 0; d < D; d += 32) {
      __m512i r[16];
      fetch(ahead, 6);
      for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(blocks[b] + i * stride + j * D + d);
      transpose(r);
      fetch(ahead, 6);
      uint32_t *to = c->keys + (b / 2 * D + d) * 16 + b % 2 * 16;
      for (int i = 0; i < 16; i++) _mm512_store_si512(to + i * 32, r[i]);
    }
}

/* Even dimensions of 32, then odd ones, as `weigh` leaves them. */
static void store_32(bf16 *out, __m512 even, __m512 odd) {
  const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(rounded(even)), 16);
  _mm512_storeu_si512(out, _mm512_or_si512(low, _mm512_castps_si512(rounded(odd))));
}

/* Scores of 16 keys from `key` on, but MASKED from `last` on and before `oldest`. */
static inline __m512 visible(__m512 scores, int key, __m512i last, __m512i oldest) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i keys = _mm512_add_epi32(lanes, _mm512_set1_epi32(key));
  const __mmask16 seen = _mm512_cmplt_epi32_mask(keys, last) & _mm512_cmpge_epi32_mask(keys, oldest);
  return _mm512_mask_mov_ps(_mm512_set1_ps(MASKED), seen, scores);
}

static inline __attribute__((always_inline)) void score_rows(const int count, const Tile *t, const float *queries,
                                                             int64_t first, Chunk *c, float *tops) {
  const int64_t D = t->pass->head_dim;
  __m512 top[ROWS];
#pragma GCC unroll 8
  for (int i = 0; i < count; i++) top[i] = _mm512_set1_ps(MASKED);
  for (int64_t n = 0; n < t->num_pairs; n++) {
    const uint32_t *keys = c->keys + n * D * 16;
    __m512 a[ROWS], b[ROWS];
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) a[i] = b[i] = _mm512_setzero_ps();
    for (int64_t d = 0; d < D; d += 2, keys += 32) {
      fetch(t->ahead, 1);
      const __m512i left = _mm512_load_si512(keys), right = _mm512_load_si512(keys + 16);
#pragma GCC unroll 8
      for (int i = 0; i < count; i++) {
        const __m512 even = _mm512_set1_ps(queries[i * D + d]), odd = _mm512_set1_ps(queries[i * D + d + 1]);
        a[i] = _mm512_fmadd_ps(even, lower(left), a[i]);
        b[i] = _mm512_fmadd_ps(even, lower(right), b[i]);
        a[i] = _mm512_fmadd_ps(odd, upper(left), a[i]);
        b[i] = _mm512_fmadd_ps(odd, upper(right), b[i]);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) {
      if (hides(t, n)) {
        const __m512i last = _mm512_set1_epi32(t->last[first + i]), oldest = _mm512_set1_epi32(t->first[first + i]);
        a[i] = visible(a[i], n * 32, last, oldest);
        b[i] = visible(b[i], n * 32 + 16, last, oldest);
      }
      top[i] = _mm512_max_ps(top[i], _mm512_max_ps(a[i], b[i]));
      float *to = c->scores + (first + i) * CHUNK + n * 32;
      _mm512_store_ps(to, a[i]);
      _mm512_store_ps(to + 16, b[i]);
    }
  }
  for (int i = 0; i < count; i++) tops[i] = _mm512_reduce_max_ps(top[i]);
}

/* Returns the highest score of each query. */
static __m512 score(const Tile *t, const float *queries, Chunk *c) {
  float tops[16];
  _mm512_storeu_ps(tops, _mm512_set1_ps(MASKED));
  for (int64_t row = 0; row < t->num_queries; row += ROWS) {
#define CALL(count) score_rows(count, t, queries + row * t->pass->head_dim, row, c, tops + row)
    BY_ROWS(t->num_queries - row, CALL)
#undef CALL
  }
  return _mm512_loadu_ps(tops);
}

/* Turn scores into exponentials against `top`; returns their sums. */
static __m512 exponentiate(const Tile *t, __m512 scale, __m512 top, Chunk *c) {
  float shifts[16], sums[16] = {0};
  _mm512_storeu_ps(shifts, _mm512_mul_ps(top, scale));
  for (int64_t row = 0; row < t->num_queries; row++) {
    const __m512 shift = _mm512_set1_ps(shifts[row]);
    __m512 sum = _mm512_setzero_ps();
    float *scores = c->scores + row * CHUNK;
    for (int64_t k = 0; k < t->num_pairs * 32; k += 16) {
      const __m512 share = exp2_of(_mm512_fmsub_ps(_mm512_load_ps(scores + k), scale, shift));
      sum = _mm512_add_ps(sum, share);
      _mm512_store_ps(scores + k, share);
    }
    sums[row] = _mm512_reduce_add_ps(sum);
  }
  return _mm512_loadu_ps(sums);
}

static inline __attribute__((always_inline)) void weigh_rows(const int count, const Tile *t, const float *shares,
                                                             int64_t d, float *product) {
  const int64_t D = t->pass->head_dim, J = t->pass->num_kv_heads, stride = 2 * J * D;
  __m512 even[ROWS], odd[ROWS];
#pragma GCC unroll 8
  for (int i = 0; i < count; i++) even[i] = odd[i] = _mm512_setzero_ps();
  for (int64_t block = 0; block < 2 * t->num_pairs; block++, shares += 16) {
    const bf16 *values = t->blocks[block] + (J + t->head) * D + d;
    for (int k = 0; k < 16; k++, values += stride) {
      fetch(t->ahead, 1);
      const __m512i pairs = _mm512_loadu_si512(values);
#pragma GCC unroll 8
      for (int i = 0; i < count; i++) {
        const __m512 share = _mm512_set1_ps(shares[i * CHUNK + k]);
        even[i] = _mm512_fmadd_ps(share, lower(pairs), even[i]);
        odd[i] = _mm512_fmadd_ps(share, upper(pairs), odd[i]);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < count; i++) {
    _mm512_store_ps(product + i * D + d, even[i]);
    _mm512_store_ps(product + i * D + d + 16, odd[i]);
  }
}

/* product = shares @ values. */
static void weigh(const Tile *t, const Chunk *c, float *product) {
  const int64_t D = t->pass->head_dim;
  for (int64_t row = 0; row < t->num_queries; row += ROWS)
    for (int64_t d = 0; d < D; d += 32) {
#define CALL(count) weigh_rows(count, t, c->scores + row * CHUNK, d, product + row * D)
      BY_ROWS(t->num_queries - row, CALL)
#undef CALL
    }
}
