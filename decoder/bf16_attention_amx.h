/* The products of bf16_attention.c in AMX tiles.

   Scores are computed transposed, keys down and queries across, so that a key's row of the pool is an AMX
   operand as it lies there, and softmax over keys needs no horizontal operation. */


typedef bf16 packed;

typedef struct {
  float *scores; /* [CHUNK, 16] */
  bf16 *shares;  /* [CHUNK / 32, 16, 32] exponentials */
  bf16 *values;  /* [CHUNK / 32, D / 16, 16, 32] pairs of keys down, dimensions across */
} Chunk;

#define CHUNK_SIZES CHUNK * 64, CHUNK * 32, CHUNK * D * 2
#define CHUNK_PARTS(c) (void **)&c.scores, (void **)&c.shares, (void **)&c.values

/* [D / 32, 16, 32] pairs of dimensions down, queries across. */
static void pack_queries(__m512i r[16], int64_t d, int64_t D, bf16 *out) {
  transpose(r);
  for (int i = 0; i < 16; i++) _mm512_store_si512(out + d * 16 + i * 32, r[i]);
}

/* Weave each two keys' values, dimension by dimension. `unpack` does so within lanes of 128 bits, which
   permutes the dimensions among 32; `store_32` puts them back. Nothing is fetched ahead: not measured with AMX. */
static void pack_chunk(const Pass *p, const bf16 *const *blocks, int64_t num_pairs, int64_t j, Ahead *ahead,
                       Chunk *c) {
  const int64_t D = p->head_dim, J = p->num_kv_heads, stride = 2 * J * D;
  for (int64_t n = 0; n < num_pairs; n++)
    for (int i = 0; i < 16; i++) {
      const bf16 *v = blocks[2 * n + i / 8] + (2 * i % 16) * stride + (J + j) * D;
      for (int64_t d = 0; d < D; d += 32) {
        __m512i even = _mm512_loadu_si512(v + d), odd = _mm512_loadu_si512(v + stride + d);
        bf16 *to = c->values + (n * D + d) * 32 + i * 32;
        _mm512_store_si512(to, _mm512_unpacklo_epi16(even, odd));
        _mm512_store_si512(to + 512, _mm512_unpackhi_epi16(even, odd));
      }
    }
}

static void store_32(bf16 *out, __m512 a, __m512 b) {
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh(_mm512_permutex2var_ps(a, high, b),
                                                        _mm512_permutex2var_ps(a, low, b)));
}

/* Returns the highest score of each query. */
static __m512 score(const Tile *t, const bf16 *queries, Chunk *c) {
  const int64_t D = t->pass->head_dim, bytes = 4 * t->pass->num_kv_heads * D;
  const __m512i behind = _mm512_loadu_si512(t->last), from = _mm512_loadu_si512(t->first);
  __m512 top = _mm512_set1_ps(MASKED), other = top;
  float *scores = c->scores;
  for (int64_t n = 0; n < t->num_pairs; n++, scores += 512) {
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t d = 0; d < D; d += 32) {
      _tile_loadd(2, queries + d * 16, 64);
      _tile_loadd(3, t->blocks[2 * n] + t->head * D + d, bytes);
      _tile_dpbf16ps(0, 3, 2);
      _tile_loadd(4, t->blocks[2 * n + 1] + t->head * D + d, bytes);
      _tile_dpbf16ps(1, 4, 2);
    }
    _tile_stored(0, scores, 64);
    _tile_stored(1, scores + 256, 64);
    if (hides(t, n))
      for (int k = 0; k < 32; k++) {
        const __m512i key = _mm512_set1_epi32((int)(n * 32 + k));
        const __mmask16 visible = _mm512_cmpgt_epi32_mask(behind, key) & _mm512_cmple_epi32_mask(from, key);
        _mm512_store_ps(scores + k * 16, _mm512_mask_blend_ps(visible, _mm512_set1_ps(MASKED),
                                                              _mm512_load_ps(scores + k * 16)));
      }
    for (int k = 0; k < 32; k += 2) {
      top = _mm512_max_ps(top, _mm512_load_ps(scores + k * 16));
      other = _mm512_max_ps(other, _mm512_load_ps(scores + k * 16 + 16));
    }
  }
  return _mm512_max_ps(top, other);
}

/* Turn scores into exponentials against `top`, as an AMX operand with queries down; returns their sums. */
static __m512 exponentiate(const Tile *t, __m512 scale, __m512 top, Chunk *c) {
  uint16_t lanes[32];
  for (int i = 0; i < 16; i++) lanes[2 * i] = i, lanes[2 * i + 1] = 16 + i;
  const __m512i weave = _mm512_loadu_si512(lanes);
  const __m512 shift = _mm512_mul_ps(top, scale);
  __m512 even_sum = _mm512_setzero_ps(), odd_sum = even_sum;
  const float *scores = c->scores;
  bf16 *shares = c->shares;
  for (int64_t n = 0; n < t->num_pairs; n++, scores += 512, shares += 512) {
    __m512i r[16];
    for (int i = 0; i < 16; i++) {
      __m512 even = exp2_of(_mm512_fmsub_ps(_mm512_load_ps(scores + 32 * i), scale, shift));
      __m512 odd = exp2_of(_mm512_fmsub_ps(_mm512_load_ps(scores + 32 * i + 16), scale, shift));
      even_sum = _mm512_add_ps(even_sum, even);
      odd_sum = _mm512_add_ps(odd_sum, odd);
      r[i] = _mm512_permutexvar_epi16(weave, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
    }
    transpose(r);
    for (int i = 0; i < 16; i++) _mm512_store_si512(shares + i * 32, r[i]);
  }
  return _mm512_add_ps(even_sum, odd_sum);
}

/* product = shares @ values. */
static void weigh(const Tile *t, const Chunk *c, float *product) {
  const int64_t D = t->pass->head_dim;
  for (int64_t d = 0; d < D; d += 32) {
    _tile_zero(4);
    _tile_zero(5);
    for (int64_t n = 0; n < t->num_pairs; n++) {
      _tile_loadd(1, c->shares + n * 512, 64);
      _tile_loadd(2, c->values + (n * D + d) * 32, 64);
      _tile_dpbf16ps(4, 1, 2);
      _tile_loadd(3, c->values + (n * D + d) * 32 + 512, 64);
      _tile_dpbf16ps(5, 1, 3);
    }
    _tile_stored(4, product + d, 4 * D);
    _tile_stored(5, product + d + 16, 4 * D);
  }
}
