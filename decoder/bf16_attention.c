/* Paged attention in bfloat16: flash attention [Dao et al. 2022] over a block table, keys and values read where
   they lie.

   Each query's arithmetic goes by its own keys, in the same order whoever shares its tile, pass or batch: a
   row's result is the same bits in every schedule.

   Legend: H query heads, J key/value heads, D head size (a multiple of 32). A tile holds 16 queries, which
   are the H / J query heads of one token after the other, of one key/value head. Called by bf16_attention.py. */

#include "bf16_kernels.h"

#include <stdlib.h>
#include <string.h>

#define CHUNK 256     /* keys whose scores are held at a time */
#define TILES 16      /* tiles of queries that go through the keys together */
/* Finite, since a chunk without a visible key must not give NaN, and a power of two, since there the fused
   MASKED * scale - MASKED * scale must be 0 and not the rounding of a product, which is large. */
#define MASKED -0x1p100f

typedef struct {
  int64_t sequence, first_token, first_tile, num_tiles, first_head, last_head;
} Work;

/* A walk over keys and values in the order of their use, a chunk ahead of the arithmetic. Of each token a head reads
   so little that the processor does not see what comes next. It goes line by line between products, since a core
   drops what it is asked to fetch faster than memory can give. */
typedef struct {
  const Pass *pass;
  const Work *work, *end;
  int64_t key, stop; /* of `work` */
  int64_t left;      /* blocks of 16 keys that may be fetched */
  const bf16 *at, *behind; /* of a block */
} Ahead;

/* A tile's queries by its own keys. `blocks` are the chunk's keys by 16, of which `num_pairs` times 32 count. */
typedef struct {
  const Pass *pass;
  const bf16 *const *blocks;
  int64_t num_pairs, head, num_queries;
  int32_t last[16], first[16]; /* keys of the chunk before which each query looks, and from which */
  Ahead *ahead;
} Tile;

/* Queries of a sequence times the query heads that share keys. */
static int64_t rows_of(const Pass *p, const Work *w) { return p->lens[w->sequence] * (p->num_heads / p->num_kv_heads); }

/* First key of the first chunk that a piece needs. */
static int64_t first_key(const Pass *p, const Work *w) {
  const int64_t group = p->num_heads / p->num_kv_heads;
  const int64_t oldest = p->starts[w->sequence] + w->first_tile * 16 / group + 1 - p->window;
  return p->window > 0 && oldest > 0 ? oldest / CHUNK * CHUNK : 0;
}

/* Keys that the last query of a piece sees. */
static int64_t keys_of(const Pass *p, const Work *w) {
  const int64_t rows = rows_of(p, w), behind = (w->first_tile + w->num_tiles) * 16;
  return p->starts[w->sequence] + ((behind < rows ? behind : rows) - 1) / (p->num_heads / p->num_kv_heads) + 1;
}

/* Row of the pool in which a key is. */
static const bf16 *row_of(const Pass *p, const Work *w, int64_t key) {
  const int32_t *table = p->tables + w->sequence * p->width;
  const int64_t row = table[key / p->block_size] * p->block_size + key % p->block_size;
  return p->pool + row * 2 * p->num_kv_heads * p->head_dim;
}

/* Go to the next 16 keys; returns whether there are any and they may be fetched. */
static int step_ahead(Ahead *a) {
  if (a->left <= 0) return 0;
  if (a->key >= a->stop) {
    if (a->work + 1 >= a->end) return 0;
    a->work++, a->key = first_key(a->pass, a->work), a->stop = keys_of(a->pass, a->work);
  }
  a->at = row_of(a->pass, a->work, a->key);
  a->behind = a->at + 16 * 2 * a->pass->num_kv_heads * a->pass->head_dim;
  a->key += 16, a->left--;
  return 1;
}

/* Begin a chunk ahead of the first piece. */
static Ahead start_ahead(const Pass *p, const Work *work, const Work *end) {
  Ahead a = {p, work, end};
  if (work < end) a.stop = keys_of(p, work), a.key = first_key(p, work), a.left = CHUNK / 16;
  while (step_ahead(&a)) a.at = a.behind;
  return a;
}

static inline void fetch(Ahead *a, int lines) {
  for (; lines > 0 && (a->at < a->behind || step_ahead(a)); lines--, a->at += 32) _mm_prefetch(a->at, _MM_HINT_T1);
}

/* Whether some query does not see all of the n-th 32 keys. Queries look further one after the other. */
static inline int hides(const Tile *t, int64_t n) { return t->pass->window > 0 || (n + 1) * 32 > t->last[0]; }

#ifdef __AMX_BF16__
#include "bf16_attention_amx.h"
#else
#include "bf16_attention_avx512.h"
#endif

typedef struct {
  packed *queries; /* [heads, TILES, 16 * D] */
  float *sums;     /* [heads, TILES, 16, D] weighted values so far */
  float *tops;     /* [heads, TILES, 16] highest score so far */
  float *weights;  /* [heads, TILES, 16] sum of exponentials so far */
  float *product;  /* [16, D] weighted values of a chunk */
  Chunk chunk;
} Scratch;

static void load_queries(const Pass *p, const Work *w, Scratch *s) {
  const int64_t D = p->head_dim, group = p->num_heads / p->num_kv_heads, rows = rows_of(p, w);
  for (int64_t j = w->first_head; j < w->last_head; j++)
    for (int64_t t = 0; t < w->num_tiles; t++) {
      const int64_t at = (j - w->first_head) * TILES + t;
      for (int64_t d = 0; d < D; d += 32) {
        __m512i r[16];
        for (int64_t i = 0, row = (w->first_tile + t) * 16; i < 16; i++, row++)
          r[i] = row < rows ? _mm512_loadu_si512(p->queries + (w->first_token + row / group) * p->token_stride +
                                                 (j * group + row % group) * p->head_stride + d)
                            : _mm512_setzero_si512();
        pack_queries(r, d, D, s->queries + at * 16 * D);
      }
      memset(s->sums + at * 16 * D, 0, 16 * D * sizeof(float));
      _mm512_store_ps(s->tops + at * 16, _mm512_set1_ps(MASKED));
      _mm512_store_ps(s->weights + at * 16, _mm512_setzero_ps());
    }
}

static void store_rows(const Pass *p, const Work *w, const Scratch *s) {
  const int64_t D = p->head_dim, group = p->num_heads / p->num_kv_heads, rows = rows_of(p, w);
  for (int64_t j = w->first_head; j < w->last_head; j++)
    for (int64_t i = 0, row = w->first_tile * 16; i < w->num_tiles * 16 && row < rows; i++, row++) {
      const int64_t at = (j - w->first_head) * TILES * 16 + i;
      bf16 *out = p->out + ((w->first_token + row / group) * p->num_heads + j * group + row % group) * D;
      const __m512 share = _mm512_set1_ps(1 / s->weights[at]);
      for (int64_t d = 0; d < D; d += 32)
        store_32(out + d, _mm512_mul_ps(_mm512_load_ps(s->sums + at * D + d), share),
                 _mm512_mul_ps(_mm512_load_ps(s->sums + at * D + d + 16), share));
    }
}

static void attend(const Pass *p, const Work *w, Scratch *s, Ahead *ahead) {
  const int64_t D = p->head_dim, group = p->num_heads / p->num_kv_heads, rows = rows_of(p, w);
  const int64_t start = p->starts[w->sequence], stop = keys_of(p, w);
  const __m512 scale = _mm512_set1_ps(p->scale * LOG2_E);
  load_queries(p, w, s);
  for (int64_t base = first_key(p, w); base < stop; base += CHUNK) {
    const int64_t num_keys = stop - base < CHUNK ? stop - base : CHUNK, num_blocks = (num_keys + 15) / 16;
    const bf16 *blocks[CHUNK / 16 + 1];
    for (int64_t b = 0; b < num_blocks; b++) blocks[b] = row_of(p, w, base + b * 16);
    blocks[num_blocks] = blocks[num_blocks - 1]; /* completes a pair; masked */
    ahead->left += num_blocks;
    for (int64_t j = w->first_head; j < w->last_head; j++) {
      pack_chunk(p, blocks, (num_keys + 31) / 32, j, ahead, &s->chunk);
      for (int64_t t = 0; t < w->num_tiles; t++) {
        const int64_t at = (j - w->first_head) * TILES + t, row = (w->first_tile + t) * 16;
        Tile tile = {p, blocks, 0, j, rows - row < 16 ? rows - row : 16, .ahead = ahead};
        for (int64_t i = 0; i < 16; i++) {
          tile.last[i] = start + (row + i < rows ? row + i : rows - 1) / group + 1 - base;
          tile.first[i] = p->window > 0 ? tile.last[i] - p->window : INT32_MIN;
        }
        if (tile.last[15] <= 0) continue;
        tile.num_pairs = ((tile.last[15] < num_keys ? tile.last[15] : num_keys) + 31) / 32;
        const __m512 top = score(&tile, s->queries + at * 16 * D, &s->chunk);
        const __m512 before = _mm512_load_ps(s->tops + at * 16), now = _mm512_max_ps(before, top);
        const __m512 sum = exponentiate(&tile, scale, now, &s->chunk);
        weigh(&tile, &s->chunk, s->product);
        const __m512 keep = exp2_of(_mm512_mul_ps(_mm512_sub_ps(before, now), scale));
        _mm512_store_ps(s->tops + at * 16, now);
        _mm512_store_ps(s->weights + at * 16, _mm512_fmadd_ps(_mm512_load_ps(s->weights + at * 16), keep, sum));
        float kept[16];
        _mm512_storeu_ps(kept, keep);
        for (int64_t i = 0; i < tile.num_queries; i++)
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
  const size_t sizes[] = {tiles * 16 * D * sizeof(packed), tiles * D * 64, tiles * 64, tiles * 64, 64 * D, CHUNK_SIZES};
  void **parts[] = {(void **)&s->queries, (void **)&s->sums,    (void **)&s->tops,
                    (void **)&s->weights, (void **)&s->product, CHUNK_PARTS(s->chunk)};
  const int count = sizeof sizes / sizeof *sizes;
  size_t total = 0;
  for (int i = 0; i < count; i++) total += sizes[i]; /* each a multiple of 64 */
  char *memory = aligned_alloc(64, total), *at = memory;
  for (int i = 0; memory && i < count; at += sizes[i++]) *parts[i] = at;
  return memory;
}

/* Attention of a packed row; K and V of the pass are in the pool. Returns 0, or 1 without memory.

   With one thread a piece of work is a run of tiles with all heads, which reads the pool in order. With more
   each head is a piece of its own. */
int specdepth_bf16_attention(const Pass *p, int64_t num_threads) {
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
    /* Several threads do not know what each takes next. */
    Ahead ahead = start_ahead(p, pieces, pieces + (num_threads > 1 ? 0 : num_pieces));
    void *memory = scratch_of(heads, p->head_dim, &scratch);
    take_tiles();
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < num_pieces; i++) {
      if (memory) {
        attend(p, &pieces[i], &scratch, &ahead);
      } else {
#pragma omp atomic write
        failed = 1;
      }
    }
    leave_tiles();
    free(memory);
  }
  free(pieces);
  return failed;
}
