// Paged attention: FlashAttention's online softmax (Dao 2023, arXiv:2307.08691) over the blocks of PagedAttention
// (Kwon et al. 2023, arXiv:2309.06180).
//
// Inside a block V lies as [token][dim]; K lies transposed in groups of 16 tokens, so that 16 scores fall out of
// a dot product without a horizontal sum: float32 as [group][dim][16], bfloat16 as [group][dim/2][16][2], the
// operand order of the vdpbf16ps instruction.
#pragma once

#include <vector>

#include "cpu_vector.h"

static const float MASKED = -1e30f;
static const int MAX_ROWS = 48;   // query rows of one tile: tokens times heads of a group
static const int MAX_DIM = 256;

// What stays the same over all layers of one iteration.
struct Iteration {
    void* pool;
    const int32_t* query_start;
    const int32_t* seq_lens;
    const int32_t* block_tables;
    const int64_t* slots;
    int64_t sequences, max_blocks, tokens;
    int64_t layers, q_heads, kv_heads, dim, block_size;
    int64_t is_bf16;
};

template <typename T> static T* slab(const Iteration& it, int64_t block, int64_t layer, int64_t kv, int64_t head) {
    return (T*)it.pool + ((((block * it.layers + layer) * 2 + kv) * it.kv_heads + head) * it.block_size) * it.dim;
}

static inline void put_key(float* k, int64_t t, int64_t dim, int64_t d, float x) {
    k[(t / 16 * dim + d) * 16 + t % 16] = x;
}
static inline void put_key(bf16* k, int64_t t, int64_t dim, int64_t d, float x) {
    narrow(x, &k[((t / 16 * (dim / 2) + d / 2) * 16 + t % 16) * 2 + d % 2]);
}

// One token's keys and values, its heads `k_head` and `v_head` elements apart, to `slot`.
template <typename T>
static inline void write_token(const Iteration& it, int64_t slot, int64_t layer, const T* k, int64_t k_head, const T* v,
                               int64_t v_head) {
    const int64_t block = slot / it.block_size, at = slot % it.block_size;
    for (int64_t h = 0; h < it.kv_heads; h++) {
        T* keys = slab<T>(it, block, layer, 0, h);
        for (int64_t d = 0; d < it.dim; d++) put_key(keys, at, it.dim, d, widen(k[h * k_head + d]));
        memcpy(slab<T>(it, block, layer, 1, h) + at * it.dim, v + h * v_head, it.dim * sizeof(T));
    }
}

// Scores of R query rows against 16 keys. `q` rows are `dim` apart. Each score is summed in PARTS chains, so that one
// product need not wait for the one before.
static const int PARTS = 4;
template <int R> static inline void dots(const float* q, const float* k, int64_t dim, f16v* s) {
    f16v part[PARTS][R];
    for (int i = 0; i < PARTS; i++)
        for (int r = 0; r < R; r++) part[i][r] = splat(0);
    for (int64_t d = 0; d < dim; d += PARTS)
        for (int i = 0; i < PARTS; i++) {
            f16v key = load(k + (d + i) * 16);
            for (int r = 0; r < R; r++) part[i][r] += key * q[r * dim + d + i];
        }
    for (int r = 0; r < R; r++) s[r] = (part[0][r] + part[1][r]) + (part[2][r] + part[3][r]);
}
template <int R> static inline void dots(const bf16* q, const bf16* k, int64_t dim, f16v* s) {
    f16v part[PARTS][R];
    for (int i = 0; i < PARTS; i++)
        for (int r = 0; r < R; r++) part[i][r] = splat(0);
    for (int64_t d = 0; d < dim; d += 2 * PARTS)
        for (int i = 0; i < PARTS; i++) {
            const int64_t at = d + 2 * i;
#ifdef __AVX512BF16__
            __m512bh key = (__m512bh)_mm512_loadu_si512(k + at * 16);
            for (int r = 0; r < R; r++) {
                int32_t pair; memcpy(&pair, q + r * dim + at, 4);
                part[i][r] = (f16v)_mm512_dpbf16_ps((__m512)part[i][r], key, (__m512bh)_mm512_set1_epi32(pair));
            }
#else
            u16v pairs; memcpy(&pairs, k + at * 16, 64);
            f16v even = (f16v)(pairs << 16), odd = (f16v)(pairs & 0xffff0000u);
            for (int r = 0; r < R; r++)
                part[i][r] += even * widen(q[r * dim + at]) + odd * widen(q[r * dim + at + 1]);
#endif
        }
    for (int r = 0; r < R; r++) s[r] = (part[0][r] + part[1][r]) + (part[2][r] + part[3][r]);
}

// acc[r] = acc[r] * alpha[r] + p[r] V for R rows, the first `keys` of 16 values, and C times 16 dimensions.
template <int R, int C, typename T>
static inline void weigh(float* acc, const float (*p)[16], const float* alpha, const T* v, int64_t dim, int keys) {
    f16v a[R][C];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) a[r][c] = load(acc + r * dim + c * 16) * alpha[r];
    for (int t = 0; t < keys; t++)
        for (int c = 0; c < C; c++) {
            f16v value = load(v + t * dim + c * 16);
            for (int r = 0; r < R; r++) a[r][c] += value * p[r][t];
        }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) store(acc + r * dim + c * 16, a[r][c]);
}

struct Mask { float scale, softcap; int64_t window; };

// R rows of a tile meet 16 keys, the first of which is at position `first`.
template <int R, typename T>
static inline void meet(const T* q, const T* k, const T* v, const int64_t* pos, float* acc, float* top, float* mass,
                        int64_t first, int keys, int64_t dim, const Mask& m) {
    static const i16v lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    f16v s[R];
    alignas(64) float p[R][16], alpha[16] = {0};
    dots<R>(q, k, dim, s);
    for (int r = 0; r < R; r++) {
        s[r] *= m.scale;
        if (m.softcap > 0)
            for (int j = 0; j < 16; j++) s[r][j] = m.softcap * std::tanh(s[r][j] / m.softcap);
        i16v unseen = lane > int32_t(pos[r] - first);
        if (m.window > 0) unseen |= lane <= int32_t(pos[r] - first - m.window);
        s[r] = unseen ? splat(MASKED) : s[r];
        const float peak = std::max(top[r], largest(s[r]));
        alpha[r] = top[r] - peak;
        top[r] = peak;
        // While nothing was seen the peak is MASKED itself, and e^0 must not count.
        s[r] = unseen ? splat(0) : vexp(s[r] - peak);
        store(p[r], s[r]);
    }
    store(alpha, vexp(load(alpha)));
    for (int r = 0; r < R; r++) mass[r] = mass[r] * alpha[r] + sum(s[r]);
    int64_t d = 0;
    for (; d + 64 <= dim; d += 64) weigh<R, 4>(acc + d, p, alpha, v + d, dim, keys);
    for (; d < dim; d += 16) weigh<R, 1>(acc + d, p, alpha, v + d, dim, keys);
}

// Ask for 16 keys and values ahead of their use: blocks lie far apart, and no prefetcher guesses the next one.
template <typename T>
static inline void fetch(const Iteration& it, const int32_t* table, int64_t first, int64_t layer, int64_t head) {
    const int64_t block = table[first / it.block_size], within = first % it.block_size;
    for (int kv = 0; kv < 2; kv++) {
        const char* at = (const char*)(slab<T>(it, block, layer, kv, head) + within * it.dim);
        for (int64_t i = 0; i < int64_t(16 * it.dim * sizeof(T)); i += 64) __builtin_prefetch(at + i);
    }
}

template <typename T>
static void attend_tile(const Iteration& it, const T* q, int64_t q_row, int64_t q_head, T* out, int64_t layer,
                        int64_t seq, int64_t head, int64_t from, int64_t count, const Mask& m, const float* sinks) {
    const int64_t dim = it.dim, group = it.q_heads / it.kv_heads, rows = count * group;
    const int64_t begin = it.query_start[seq], length = it.seq_lens[seq];
    const int64_t context = length - (it.query_start[seq + 1] - begin);
    alignas(64) T query[MAX_ROWS * MAX_DIM];
    alignas(64) float acc[MAX_ROWS * MAX_DIM];
    float top[MAX_ROWS], mass[MAX_ROWS];
    int64_t pos[MAX_ROWS];
    for (int64_t r = 0; r < rows; r++) {
        int64_t token = from + r / group, h = head * group + r % group;
        memcpy(query + r * dim, q + (begin + token) * q_row + h * q_head, dim * sizeof(T));
        pos[r] = context + token;
        top[r] = sinks ? sinks[h] : MASKED;
        mass[r] = sinks ? 1.0f : 0.0f;
    }
    memset(acc, 0, rows * dim * sizeof(float));
    const int64_t last = context + from + count - 1;
    const int64_t oldest = m.window > 0 ? std::max<int64_t>(0, context + from - m.window + 1) : 0;
    const int32_t* table = it.block_tables + seq * it.max_blocks;
    for (int64_t first = oldest / 16 * 16; first <= last; first += 16) {
        if (first + 16 <= last) fetch<T>(it, table, first + 16, layer, head);
        const int64_t block = table[first / it.block_size], within = first % it.block_size;
        const T* k = slab<T>(it, block, layer, 0, head) + within * dim;
        const T* v = slab<T>(it, block, layer, 1, head) + within * dim;
        const int keys = int(std::min<int64_t>(16, last + 1 - first));
        int64_t r = 0;
#define MEET(N) meet<N>(query + r * dim, k, v, pos + r, acc + r * dim, top + r, mass + r, first, keys, dim, m)
        for (; r + 4 <= rows; r += 4) MEET(4);
        switch (rows - r) {
            case 3: MEET(3); break;
            case 2: MEET(2); break;
            case 1: MEET(1); break;
        }
#undef MEET
    }
    for (int64_t r = 0; r < rows; r++) {
        T* o = out + ((begin + from + r / group) * it.q_heads + head * group + r % group) * dim;
        f16v inverse = splat(1.0f / mass[r]);
        for (int64_t d = 0; d < dim; d += 16) store(o + d, load(acc + r * dim + d) * inverse);
    }
}

struct Tile { int32_t seq, head, from, count; };

static std::vector<Tile>& tiles_of(const Iteration& it) {
    const int64_t per_tile = std::max<int64_t>(1, MAX_ROWS / (it.q_heads / it.kv_heads));
    static thread_local std::vector<Tile> tiles;
    tiles.clear();
    for (int64_t s = 0; s < it.sequences; s++) {
        int64_t n = it.query_start[s + 1] - it.query_start[s];
        for (int64_t from = 0; from < n; from += per_tile)
            for (int64_t h = 0; h < it.kv_heads; h++)
                tiles.push_back({int32_t(s), int32_t(h), int32_t(from), int32_t(std::min(per_tile, n - from))});
    }
    return tiles;
}

