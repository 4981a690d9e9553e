/* Paged attention in bfloat16 on Intel AMX: flash attention [Dao et al. 2022] over a block table.

   Scores are computed transposed, keys down and queries across, so that a key's row of the pool is an AMX
   operand as it lies there, and softmax over keys needs no horizontal operation. Each query's arithmetic
   goes by its own keys, in the same order whoever shares its tile, pass or batch: a row's result is the
   same bits in every schedule.

   Legend: H query heads, J key/value heads, D head size (a multiple of 32). A tile holds 16 queries, which
   are the H / J query heads of one token after the other, of one key/value head. Called by amx_attention.py. */

#include "amx_common.h"

#include <stdlib.h>
#include <string.h>

#define CHUNK 256     /* keys whose scores are held at a time */
#define TILES 16      /* tiles of queries that go through the keys together */
/* Finite, since a chunk without a visible key must not give NaN, and a power of two, since there the fused
   MASKED * scale - MASKED * scale must be 0 and not the rounding of a product, which is large. */
#define MASKED -0x1p100f

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

typedef struct {
  int64_t sequence, first_token, first_tile, num_tiles, first_head, last_head;
} Work;

typedef struct {
  bf16 *queries;  /* [heads, TILES, D / 32, 16, 32] pairs of dimensions down, queries across */
  float *sums;    /* [heads, TILES, 16, D] weighted values so far */
  float *tops;    /* [heads, TILES, 16] highest score so far */
  float *weights; /* [heads, TILES, 16] sum of exponentials so far */
  float *scores;  /* [CHUNK, 16] */
  bf16 *shares;   /* [CHUNK / 32, 16, 32] exponentials */
  bf16 *values;   /* [CHUNK / 32, D / 16, 16, 32] pairs of keys down, dimensions across */
  float *product; /* [16, D] */
} Scratch;

static inline void transpose(__m512i r[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int k = 0; k < 2; k++) {
      r[i + 2 * k] = _mm512_unpacklo_epi64(t[i + k], t[i + k + 2]);
      r[i + 2 * k + 1] = _mm512_unpackhi_epi64(t[i + k], t[i + k + 2]);
    }
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 16; k += 8) {
      t[i + k] = _mm512_shuffle_i32x4(r[i + k], r[i + k + 4], 0x88);
      t[i + k + 4] = _mm512_shuffle_i32x4(r[i + k], r[i + k + 4], 0xdd);
    }
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 8; k += 4) {
      r[i + k] = _mm512_shuffle_i32x4(t[i + k], t[i + k + 8], 0x88);
      r[i + k + 8] = _mm512_shuffle_i32x4(t[i + k], t[i + k + 8], 0xdd);
    }
}

static void load_queries(const Pass *p, const Work *w, Scratch *s) {
  const int64_t D = p->head_dim, group = p->num_heads / p->num_kv_heads, rows = p->lens[w->sequence] * group;
  for (int64_t j = w->first_head; j < w->last_head; j++)
    for (int64_t t = 0; t < w->num_tiles; t++) {
      const int64_t at = (j - w->first_head) * TILES + t;
      for (int64_t d = 0; d < D; d += 32) {
        __m512i r[16];
        for (int64_t i = 0, row = (w->first_tile + t) * 16; i < 16; i++, row++)
          r[i] = row < rows ? _mm512_loadu_si512(p->queries + (w->first_token + row / group) * p->token_stride +
                                                 (j * group + row % group) * p->head_stride + d)
                            : _mm512_setzero_si512();
        transpose(r);
        for (int i = 0; i < 16; i++) _mm512_store_si512(s->queries + at * 16 * D + d * 16 + i * 32, r[i]);
      }
      memset(s->sums + at * 16 * D, 0, 16 * D * sizeof(float));
      _mm512_store_ps(s->tops + at * 16, _mm512_set1_ps(MASKED));
      _mm512_store_ps(s->weights + at * 16, _mm512_setzero_ps());
    }
}

/* Weave each two keys' values, dimension by dimension. `unpack` does so within lanes of 128 bits, which
   permutes the dimensions among 32; `store_rows` puts them back. */
static void weave_values(const Pass *p, const bf16 *const *blocks, int64_t num_pairs, int64_t j, bf16 *out) {
  const int64_t D = p->head_dim, J = p->num_kv_heads, stride = 2 * J * D;
  for (int64_t n = 0; n < num_pairs; n++)
    for (int i = 0; i < 16; i++) {
      const bf16 *v = blocks[2 * n + i / 8] + (2 * i % 16) * stride + (J + j) * D;
      for (int64_t d = 0; d < D; d += 32) {
        __m512i even = _mm512_loadu_si512(v + d), odd = _mm512_loadu_si512(v + stride + d);
        bf16 *to = out + (n * D + d) * 32 + i * 32;
        _mm512_store_si512(to, _mm512_unpacklo_epi16(even, odd));
        _mm512_store_si512(to + 512, _mm512_unpackhi_epi16(even, odd));
      }
    }
}

/* Scores of `num_pairs` times 32 keys from position `base` on; returns the highest of each query. */
static __m512 score(const Pass *p, const bf16 *const *blocks, int64_t num_pairs, int64_t j, const bf16 *queries,
                    const int64_t *seen, int64_t base, float *scores) {
  const int64_t D = p->head_dim, bytes = 4 * p->num_kv_heads * D;
  int32_t last[16], first[16];
  for (int i = 0; i < 16; i++) {
    last[i] = (int32_t)(seen[i] - base);
    first[i] = p->window > 0 ? last[i] - (int32_t)p->window : INT32_MIN;
  }
  const __m512i behind = _mm512_loadu_si512(last), from = _mm512_loadu_si512(first);
  __m512 top = _mm512_set1_ps(MASKED), other = top;
  for (int64_t n = 0; n < num_pairs; n++, scores += 512) {
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t d = 0; d < D; d += 32) {
      _tile_loadd(2, queries + d * 16, 64);
      _tile_loadd(3, blocks[2 * n] + j * D + d, bytes);
      _tile_dpbf16ps(0, 3, 2);
      _tile_loadd(4, blocks[2 * n + 1] + j * D + d, bytes);
      _tile_dpbf16ps(1, 4, 2);
    }
    _tile_stored(0, scores, 64);
    _tile_stored(1, scores + 256, 64);
    if (p->window > 0 || base + (n + 1) * 32 > seen[0])
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
static __m512 exponentiate(const float *scores, int64_t num_pairs, __m512 scale, __m512 top, bf16 *shares) {
  uint16_t lanes[32];
  for (int i = 0; i < 16; i++) lanes[2 * i] = i, lanes[2 * i + 1] = 16 + i;
  const __m512i weave = _mm512_loadu_si512(lanes);
  const __m512 shift = _mm512_mul_ps(top, scale);
  __m512 even_sum = _mm512_setzero_ps(), odd_sum = even_sum;
  for (int64_t n = 0; n < num_pairs; n++, scores += 512, shares += 512) {
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
static void weigh(const bf16 *shares, const bf16 *values, int64_t num_pairs, int64_t D, float *product) {
  for (int64_t d = 0; d < D; d += 32) {
    _tile_zero(4);
    _tile_zero(5);
    for (int64_t n = 0; n < num_pairs; n++) {
      _tile_loadd(1, shares + n * 512, 64);
      _tile_loadd(2, values + (n * D + d) * 32, 64);
      _tile_dpbf16ps(4, 1, 2);
      _tile_loadd(3, values + (n * D + d) * 32 + 512, 64);
      _tile_dpbf16ps(5, 1, 3);
    }
    _tile_stored(4, product + d, 4 * D);
    _tile_stored(5, product + d + 16, 4 * D);
  }
}

static void store_rows(const Pass *p, const Work *w, const Scratch *s) {
  const int64_t D = p->head_dim, group = p->num_heads / p->num_kv_heads, rows = p->lens[w->sequence] * group;
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  for (int64_t j = w->first_head; j < w->last_head; j++)
    for (int64_t i = 0, row = w->first_tile * 16; i < w->num_tiles * 16 && row < rows; i++, row++) {
      const int64_t at = (j - w->first_head) * TILES * 16 + i;
      bf16 *out = p->out + ((w->first_token + row / group) * p->num_heads + j * group + row % group) * D;
      const __m512 share = _mm512_set1_ps(1 / s->weights[at]);
      for (int64_t d = 0; d < D; d += 32) {
        __m512 a = _mm512_mul_ps(_mm512_load_ps(s->sums + at * D + d), share);
        __m512 b = _mm512_mul_ps(_mm512_load_ps(s->sums + at * D + d + 16), share);
        _mm512_storeu_si512(out + d, (__m512i)_mm512_cvtne2ps_pbh(_mm512_permutex2var_ps(a, high, b),
                                                                  _mm512_permutex2var_ps(a, low, b)));
      }
    }
}

static void attend(const Pass *p, const Work *w, Scratch *s) {
  const int64_t D = p->head_dim, group = p->num_heads / p->num_kv_heads, rows = p->lens[w->sequence] * group;
  const int64_t start = p->starts[w->sequence];
  const int32_t *table = p->tables + w->sequence * p->width;
  const __m512 scale = _mm512_set1_ps(p->scale * LOG2_E);
  const int64_t behind = (w->first_tile + w->num_tiles) * 16 < rows ? (w->first_tile + w->num_tiles) * 16 : rows;
  const int64_t stop = start + (behind - 1) / group + 1; /* keys that the last query sees */
  int64_t base = 0;
  if (p->window > 0) {
    const int64_t oldest = start + w->first_tile * 16 / group + 1 - p->window;
    base = oldest > 0 ? oldest / CHUNK * CHUNK : 0;
  }
  load_queries(p, w, s);
  for (; base < stop; base += CHUNK) {
    const int64_t num_keys = stop - base < CHUNK ? stop - base : CHUNK, num_blocks = (num_keys + 15) / 16;
    const bf16 *blocks[CHUNK / 16 + 1];
    for (int64_t b = 0; b < num_blocks; b++) {
      const int64_t key = base + b * 16;
      const int64_t row = table[key / p->block_size] * p->block_size + key % p->block_size;
      blocks[b] = p->pool + row * 2 * p->num_kv_heads * D;
    }
    blocks[num_blocks] = blocks[num_blocks - 1]; /* completes a pair; masked */
    for (int64_t j = w->first_head; j < w->last_head; j++) {
      weave_values(p, blocks, (num_keys + 31) / 32, j, s->values);
      for (int64_t t = 0; t < w->num_tiles; t++) {
        const int64_t at = (j - w->first_head) * TILES + t;
        int64_t seen[16]; /* keys before which each query looks */
        for (int64_t i = 0, row = (w->first_tile + t) * 16; i < 16; i++, row++)
          seen[i] = start + (row < rows ? row : rows - 1) / group + 1;
        if (seen[15] <= base) continue;
        const int64_t keys = seen[15] - base < num_keys ? seen[15] - base : num_keys, pairs = (keys + 31) / 32;
        const __m512 top = score(p, blocks, pairs, j, s->queries + at * 16 * D, seen, base, s->scores);
        const __m512 before = _mm512_load_ps(s->tops + at * 16), now = _mm512_max_ps(before, top);
        const __m512 sum = exponentiate(s->scores, pairs, scale, now, s->shares);
        weigh(s->shares, s->values, pairs, D, s->product);
        const __m512 keep = exp2_of(_mm512_mul_ps(_mm512_sub_ps(before, now), scale));
        _mm512_store_ps(s->tops + at * 16, now);
        _mm512_store_ps(s->weights + at * 16, _mm512_fmadd_ps(_mm512_load_ps(s->weights + at * 16), keep, sum));
        float kept[16];
        _mm512_storeu_ps(kept, keep);
        for (int64_t i = 0; i < 16; i++)
          for (int64_t d = 0; d < D; d += 16) {
            float *to = s->sums + (at * 16 + i) * D + d;
            _mm512_store_ps(to, _mm512_fmadd_ps(_mm512_load_ps(to), _mm512_set1_ps(kept[i]),
                                                _mm512_load_ps(s->product + i * D + d)));
          }
      }
    }
  }
  store_rows(p, w, s);
}

static void *scratch_of(int64_t heads, int64_t D, Scratch *s) {
  const size_t tiles = heads * TILES;
  const size_t sizes[8] = {tiles * D * 32, tiles * D * 64, tiles * 64,    tiles * 64,
                           CHUNK * 64,     CHUNK * 32,     CHUNK * D * 2, 64 * D};
  size_t total = 0;
  for (int i = 0; i < 8; i++) total += sizes[i]; /* each a multiple of 64 */
  char *memory = aligned_alloc(64, total), *at = memory;
  void **parts[8] = {(void **)&s->queries, (void **)&s->sums,   (void **)&s->tops,   (void **)&s->weights,
                     (void **)&s->scores,  (void **)&s->shares, (void **)&s->values, (void **)&s->product};
  for (int i = 0; memory && i < 8; at += sizes[i++]) *parts[i] = at;
  return memory;
}

/* Attention of a packed row; K and V of the pass are in the pool. Returns 0, or 1 without memory.

   With one thread a piece of work is a run of tiles with all heads, which reads the pool in order. With more
   each head is a piece of its own. */
int specdepth_amx_attention(const Pass *p, int64_t num_threads) {
  const int64_t group = p->num_heads / p->num_kv_heads;
  const int64_t heads = num_threads > 1 ? 1 : p->num_kv_heads;
  int64_t num_pieces = 0;
  for (int64_t n = 0; n < p->num_sequences; n++)
    num_pieces += ((p->lens[n] * group + 15) / 16 + TILES - 1) / TILES * (p->num_kv_heads / heads);
  Work *pieces = malloc(num_pieces * sizeof(Work));
  if (!pieces) return 1;
  int64_t token = 0, at = 0;
  for (int64_t n = 0; n < p->num_sequences; token += p->lens[n++]) {
    const int64_t tiles = (p->lens[n] * group + 15) / 16;
    for (int64_t t = 0; t < tiles; t += TILES)
      for (int64_t j = 0; j < p->num_kv_heads; j += heads)
        pieces[at++] = (Work){n, token, t, tiles - t < TILES ? tiles - t : TILES, j, j + heads};
  }
  int failed = 0;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    Scratch scratch;
    void *memory = scratch_of(heads, p->head_dim, &scratch);
    configure_tiles();
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < num_pieces; i++) {
      if (memory) {
        attend(p, &pieces[i], &scratch);
      } else {
#pragma omp atomic write
        failed = 1;
      }
    }
    _tile_release();
    free(memory);
  }
  free(pieces);
  return failed;
}
