// Paged attention: FlashAttention's online softmax (Dao 2023, arXiv:2307.08691) over the blocks of PagedAttention
// (Kwon et al. 2023, arXiv:2309.06180).
//
// Inside a block K lies transposed in groups of 16 tokens, so that 16 scores fall out of a dot product without a
// horizontal sum: float32 as [group][dim][16], bfloat16 as [group][dim/2][16][2]. V lies as [token][dim] in float32, as
// [token/2][dim][2] in bfloat16. Pairs are the operand order of the vdpbf16ps instruction.
#pragma once

#include <type_traits>
#include <vector>

#include "cpu_vector.h"

static const float MASKED = -1e30f;
static const int MAX_ROWS = 48;   // query rows of one tile: tokens times heads of a group
static const int MAX_DIM = 256;
static const int GROUPS = 4;      // of 16 keys that meet a query at once

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

static inline void put_value(float* v, int64_t t, int64_t dim, const float* x) { memcpy(v + t * dim, x, dim * 4); }
static inline void put_value(bf16* v, int64_t t, int64_t dim, const bf16* x) {
    bf16* pair = v + t / 2 * 2 * dim + t % 2;
    for (int64_t d = 0; d < dim; d++) pair[2 * d] = x[d];
}

// One token's keys and values, its heads `k_head` and `v_head` elements apart, to `slot`.
template <typename T>
static inline void write_token(const Iteration& it, int64_t slot, int64_t layer, const T* k, int64_t k_head, const T* v,
                               int64_t v_head) {
    const int64_t block = slot / it.block_size, at = slot % it.block_size;
    for (int64_t h = 0; h < it.kv_heads; h++) {
        T* keys = slab<T>(it, block, layer, 0, h);
        for (int64_t d = 0; d < it.dim; d++) put_key(keys, at, it.dim, d, widen(k[h * k_head + d]));
        put_value(slab<T>(it, block, layer, 1, h), at, it.dim, v + h * v_head);
    }
}

// Scores of R query rows against 16 keys. `q` rows are `dim` apart. Each score is summed in PARTS chains, so that one
// product need not wait for the one before.
static const int PARTS = 4;
template <int R> static inline void dots(const float* q, const float* k, int64_t dim, f16v (*s)[GROUPS]) {
    f16v part[PARTS][R];
    for (int i = 0; i < PARTS; i++)
        for (int r = 0; r < R; r++) part[i][r] = splat(0);
    for (int64_t d = 0; d < dim; d += PARTS)
        for (int i = 0; i < PARTS; i++) {
            f16v key = load(k + (d + i) * 16);
            for (int r = 0; r < R; r++) part[i][r] += key * q[r * dim + d + i];
        }
    for (int r = 0; r < R; r++) s[r][0] = (part[0][r] + part[1][r]) + (part[2][r] + part[3][r]);
}
template <int R> static inline void dots(const bf16* q, const bf16* k, int64_t dim, f16v (*s)[GROUPS]) {
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
    for (int r = 0; r < R; r++) s[r][0] = (part[0][r] + part[1][r]) + (part[2][r] + part[3][r]);
}

// a[r][c] += p[r] V for R rows, the first `keys` of 16 values, and C times 16 dimensions.
template <int R, int C>
static inline void weigh(f16v (*a)[C], const float (*p)[16 * GROUPS], const float* v, int64_t dim, int keys) {
    for (int t = 0; t < keys; t++)
        for (int c = 0; c < C; c++) {
            f16v value = load(v + t * dim + c * 16);
            for (int r = 0; r < R; r++) a[r][c] += value * p[r][t];
        }
}
template <int R, int C>
static inline void weigh(f16v (*a)[C], const bf16 (*p)[16 * GROUPS], const bf16* v, int64_t dim, int keys) {
    for (int t = 0; t < keys; t += 2)
        for (int c = 0; c < C; c++) {
            u16v pairs;
            memcpy(&pairs, v + t * dim + c * 32, 64);
            // Whatever lies behind the last key may be no number, and zero times that is none either.
            if (t + 1 == keys) pairs &= 0xffffu;
#ifdef __AVX512BF16__
            for (int r = 0; r < R; r++) {
                int32_t pair;
                memcpy(&pair, p[r] + t, 4);
                a[r][c] = (f16v)_mm512_dpbf16_ps((__m512)a[r][c], (__m512bh)pairs, (__m512bh)_mm512_set1_epi32(pair));
            }
#else
            f16v even = (f16v)(pairs << 16), odd = (f16v)(pairs & 0xffff0000u);
            for (int r = 0; r < R; r++) a[r][c] += even * widen(p[r][t]) + odd * widen(p[r][t + 1]);
#endif
        }
}

struct Mask { float scale, softcap; int64_t window; };

// Up to GROUPS times 16 keys and values; the first key is at position `first`, the last group has `keys` of them.
template <typename T> struct Visit {
    const T *k[GROUPS], *v[GROUPS];
    int groups, keys;
    int64_t first;
};

template <int R, int C, typename T>
static inline void gather(float* acc, const T (*p)[16 * GROUPS], const float* alpha, const Visit<T>& visit, int64_t dim,
                          int64_t d) {
    f16v a[R][C];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) a[r][c] = load(acc + r * dim + d + c * 16) * alpha[r];
    // In pairs of dimensions where the values lie in pairs of tokens.
    const int64_t at = std::is_same<T, bf16>::value ? 2 * d : d;
    for (int g = 0; g < visit.groups; g++) {
        const T(*part)[16 * GROUPS] = (const T(*)[16 * GROUPS])(p[0] + 16 * g);
        weigh<R, C>(a, part, visit.v[g] + at, dim, g + 1 < visit.groups ? 16 : visit.keys);
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) store(acc + r * dim + d + c * 16, a[r][c]);
}

// R rows of a tile meet the keys of a visit.
template <int R, typename T>
static inline void meet(const T* q, const Visit<T>& visit, const int64_t* pos, float* acc, float* top, float* mass,
                        int64_t dim, const Mask& m) {
    static const i16v lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    f16v s[R][GROUPS];
    alignas(64) T p[R][16 * GROUPS];
    alignas(64) float alpha[16] = {0}, fresh[R];
    for (int g = 0; g < visit.groups; g++) dots<R>(q, visit.k[g], dim, (f16v(*)[GROUPS])(s[0] + g));
    for (int r = 0; r < R; r++) {
        f16v peaks = splat(MASKED);
        for (int g = 0; g < visit.groups; g++) {
            f16v x = s[r][g] * m.scale;
            if (m.softcap > 0)
                for (int j = 0; j < 16; j++) x[j] = m.softcap * std::tanh(x[j] / m.softcap);
            const int64_t at = pos[r] - visit.first - 16 * g;
            if (at < 15) x = lane > int32_t(at) ? splat(MASKED) : x;
            if (m.window > 0) x = lane <= int32_t(at - m.window) ? splat(MASKED) : x;
            s[r][g] = x;
            peaks = vmax(peaks, x);
        }
        const float peak = std::max(top[r], largest(peaks));
        alpha[r] = top[r] - peak;
        top[r] = peak;
        f16v total = splat(0);
        for (int g = 0; g < visit.groups; g++) {
            // While nothing was seen the peak is MASKED itself, and e^0 must not count.
            f16v e = vexp(s[r][g] - peak);
            if (m.window > 0 || pos[r] < visit.first + 16 * g + 15) e = s[r][g] == splat(MASKED) ? splat(0) : e;
            store(p[r] + 16 * g, e);
            // What the values are weighed with, rounded or not, adds up to one.
            total += rounded<T>(e);
        }
        fresh[r] = sum(total);
    }
    store(alpha, vexp(load(alpha)));
    for (int r = 0; r < R; r++) mass[r] = mass[r] * alpha[r] + fresh[r];
    int64_t d = 0;
    for (; d + 64 <= dim; d += 64) gather<R, 4>(acc, p, alpha, visit, dim, d);
    for (; d < dim; d += 16) gather<R, 1>(acc, p, alpha, visit, dim, d);
}

// Ask for 16 keys and values ahead of their use: blocks lie far apart, and no prefetcher guesses the next one.
template <typename T> static inline void fetch(const T* k, const T* v, int64_t dim) {
    for (int64_t i = 0; i < 16 * dim; i += 64 / sizeof(T)) __builtin_prefetch(k + i), __builtin_prefetch(v + i);
}

// `count` tokens of one sequence, from the chunk's `from` on, and `heads` KV heads with their groups of query heads.
struct Tile { int32_t seq, head, heads, from, count; };

template <typename T>
static void attend_tile(const Iteration& it, const T* q, int64_t q_row, int64_t q_head, T* out, int64_t layer,
                        const Tile& tile, const Mask& m, const float* sinks) {
    const int64_t dim = it.dim, group = it.q_heads / it.kv_heads, per_head = tile.count * group;
    const int64_t rows = per_head * tile.heads, begin = it.query_start[tile.seq], length = it.seq_lens[tile.seq];
    const int64_t context = length - (it.query_start[tile.seq + 1] - begin) + tile.from;
    alignas(64) T query[MAX_ROWS * MAX_DIM];
    alignas(64) float acc[MAX_ROWS * MAX_DIM];
    float top[MAX_ROWS], mass[MAX_ROWS];
    int64_t pos[MAX_ROWS];
    const auto token = [&](int64_t r) { return r % per_head / group; };
    const auto q_of = [&](int64_t r) { return (tile.head + r / per_head) * group + r % group; };
    for (int64_t r = 0; r < rows; r++) {
        memcpy(query + r * dim, q + (begin + tile.from + token(r)) * q_row + q_of(r) * q_head, dim * sizeof(T));
        pos[r] = context + token(r);
        top[r] = sinks ? sinks[q_of(r)] : MASKED;
        mass[r] = sinks ? 1.0f : 0.0f;
    }
    memset(acc, 0, rows * dim * sizeof(float));
    const int64_t last = context + tile.count - 1;
    const int64_t oldest = m.window > 0 ? std::max<int64_t>(0, context - m.window + 1) : 0;
    const int32_t* table = it.block_tables + tile.seq * it.max_blocks;
    const auto visit_of = [&](int64_t first, int64_t h) {
        Visit<T> visit;
        visit.first = first;
        visit.groups = int(std::min<int64_t>(GROUPS, (last - first) / 16 + 1));
        visit.keys = int(std::min<int64_t>(16, last + 1 - first - 16 * (visit.groups - 1)));
        for (int g = 0; g < visit.groups; g++) {
            const int64_t at = first + 16 * g, block = table[at / it.block_size], within = at % it.block_size * dim;
            visit.k[g] = slab<T>(it, block, layer, 0, tile.head + h) + within;
            visit.v[g] = slab<T>(it, block, layer, 1, tile.head + h) + within;
        }
        return visit;
    };
    Visit<T> next = visit_of(oldest / 16 * 16, 0);
    for (int64_t first = next.first; first <= last; first += 16 * GROUPS)
        for (int64_t h = 0, r = 0; h < tile.heads; h++) {
            const Visit<T> visit = next;
            const bool more = h + 1 < tile.heads;
            if (more || first + 16 * GROUPS <= last) {
                next = visit_of(more ? first : first + 16 * GROUPS, more ? h + 1 : 0);
                for (int g = 0; g < next.groups; g++) fetch(next.k[g], next.v[g], dim);
            }
            const int64_t end = r + per_head;
#define MEET(N) meet<N>(query + r * dim, visit, pos + r, acc + r * dim, top + r, mass + r, dim, m)
            for (; r + 4 <= end; r += 4) MEET(4);
            switch (end - r) {
                case 3: MEET(3); break;
                case 2: MEET(2); break;
                case 1: MEET(1); break;
            }
#undef MEET
            r = end;
        }
    for (int64_t r = 0; r < rows; r++) {
        T* o = out + ((begin + tile.from + token(r)) * it.q_heads + q_of(r)) * dim;
        f16v inverse = splat(1.0f / mass[r]);
        for (int64_t d = 0; d < dim; d += 16) store(o + d, load(acc + r * dim + d) * inverse);
    }
}

// A decode takes all heads of a block, which lie together, in one go; but as many pieces as keep all threads busy.
static std::vector<Tile>& tiles_of(const Iteration& it, int64_t threads) {
    const int64_t group = it.q_heads / it.kv_heads, tokens = std::max<int64_t>(1, MAX_ROWS / group);
    static thread_local std::vector<Tile> tiles;
    tiles.clear();
    for (int64_t s = 0; s < it.sequences; s++) {
        const int64_t n = it.query_start[s + 1] - it.query_start[s];
        for (int64_t from = 0; from < n; from += tokens) {
            const int64_t count = std::min(tokens, n - from);
            const int64_t most = it.sequences >= 4 * threads ? MAX_ROWS / (group * count) : 1;
            for (int64_t h = 0; h < it.kv_heads; h += most)
                tiles.push_back({int32_t(s), int32_t(h), int32_t(std::min(most, it.kv_heads - h)), int32_t(from),
                                 int32_t(count)});
        }
    }
    return tiles;
}
