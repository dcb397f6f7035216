// CPU kernels of plait: paged attention, cache write with rotary embedding, RMSNorm, SiLU.
//
// Plain C ABI, called through ctypes. Vectors of 16 floats are GCC/Clang vector extensions, which the compiler
// lowers to AVX-512, AVX2 or NEON. Attention is FlashAttention's online softmax (Dao 2023, arXiv:2307.08691)
// over the blocks of PagedAttention (Kwon et al. 2023, arXiv:2309.06180).
//
// Inside a block V lies as [token][dim]; K lies transposed in groups of 16 tokens, so that 16 scores fall out of
// a dot product without a horizontal sum: float32 as [group][dim][16], bfloat16 as [group][dim/2][16][2], the
// operand order of the vdpbf16ps instruction.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>
#include <vector>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

typedef float f16v __attribute__((vector_size(64)));
typedef int32_t i16v __attribute__((vector_size(64)));
typedef uint32_t u16v __attribute__((vector_size(64)));
typedef uint16_t h16v __attribute__((vector_size(32)));
struct bf16 { uint16_t bits; };

static const float MASKED = -1e30f;
static const int MAX_ROWS = 48;   // query rows of one tile: tokens times heads of a group
static const int MAX_DIM = 256;
static const int64_t SERIAL = 16384;  // elements below which a second thread costs more than it brings

static inline float widen(float x) { return x; }
static inline float widen(bf16 x) { uint32_t u = uint32_t(x.bits) << 16; float f; memcpy(&f, &u, 4); return f; }
static inline void narrow(float x, float* out) { *out = x; }
static inline void narrow(float x, bf16* out) {
    uint32_t u; memcpy(&u, &x, 4);
    out->bits = uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
static inline f16v splat(float x) { return f16v{} + x; }
static inline f16v load(const float* p) { f16v v; memcpy(&v, p, 64); return v; }
static inline f16v load(const bf16* p) {
    h16v h; memcpy(&h, p, 32);
    return (f16v)(__builtin_convertvector(h, u16v) << 16);
}
static inline void store(float* p, f16v v) { memcpy(p, &v, 64); }
static inline void store(bf16* p, f16v v) {
    u16v u = (u16v)v;
    h16v h = __builtin_convertvector((u + 0x7fff + ((u >> 16) & 1)) >> 16, h16v);
    memcpy(p, &h, 32);
}
template <typename T> static inline f16v rounded(f16v v);
template <> inline f16v rounded<float>(f16v v) { return v; }
template <> inline f16v rounded<bf16>(f16v v) {
    u16v u = (u16v)v;
    return (f16v)((u + 0x7fff + ((u >> 16) & 1)) & 0xffff0000u);
}
static inline float sum(f16v v) { float s = 0; for (int i = 0; i < 16; i++) s += v[i]; return s; }
static inline f16v vmax(f16v a, f16v b) { return a > b ? a : b; }
static inline float largest(f16v v) { float m = v[0]; for (int i = 1; i < 16; i++) m = std::max(m, v[i]); return m; }

// e^x to 2 ulp by Cephes' expf: range reduction by ln 2 in two parts, then a polynomial of degree 6.
static inline f16v vexp(f16v x) {
    x = vmax(x, splat(-87.3f));
    x = x < splat(88.0f) ? x : splat(88.0f);
    f16v t = x * 1.44269504f;
    i16v n = __builtin_convertvector(t + (t < splat(0) ? splat(-0.5f) : splat(0.5f)), i16v);
    f16v k = __builtin_convertvector(n, f16v);
    f16v r = (x - k * 0.693359375f) + k * 2.12194440e-4f;
    f16v p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return (f16v)((i16v)p + (n << 23));
}

extern "C" {

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

}  // extern "C"

template <typename T> static T* slab(const Iteration& it, int64_t block, int64_t layer, int64_t kv, int64_t head) {
    return (T*)it.pool + ((((block * it.layers + layer) * 2 + kv) * it.kv_heads + head) * it.block_size) * it.dim;
}

static inline void put_key(float* k, int64_t t, int64_t dim, int64_t d, float x) {
    k[(t / 16 * dim + d) * 16 + t % 16] = x;
}
static inline void put_key(bf16* k, int64_t t, int64_t dim, int64_t d, float x) {
    narrow(x, &k[((t / 16 * (dim / 2) + d / 2) * 16 + t % 16) * 2 + d % 2]);
}

// Scores of R query rows against 16 keys. `q` rows are `dim` apart.
template <int R> static inline void dots(const float* q, const float* k, int64_t dim, f16v* s) {
    for (int r = 0; r < R; r++) s[r] = splat(0);
    for (int64_t d = 0; d < dim; d++) {
        f16v key = load(k + d * 16);
        for (int r = 0; r < R; r++) s[r] += key * q[r * dim + d];
    }
}
template <int R> static inline void dots(const bf16* q, const bf16* k, int64_t dim, f16v* s) {
    for (int r = 0; r < R; r++) s[r] = splat(0);
    for (int64_t d = 0; d < dim; d += 2) {
#ifdef __AVX512BF16__
        __m512bh key = (__m512bh)_mm512_loadu_si512(k + d * 16);
        for (int r = 0; r < R; r++) {
            int32_t pair; memcpy(&pair, q + r * dim + d, 4);
            s[r] = (f16v)_mm512_dpbf16_ps((__m512)s[r], key, (__m512bh)_mm512_set1_epi32(pair));
        }
#else
        u16v pairs; memcpy(&pairs, k + d * 16, 64);
        f16v even = (f16v)(pairs << 16), odd = (f16v)(pairs & 0xffff0000u);
        for (int r = 0; r < R; r++) s[r] += even * widen(q[r * dim + d]) + odd * widen(q[r * dim + d + 1]);
#endif
    }
}

// acc[r] = acc[r] * alpha[r] + p[r] V for R rows and the first `keys` of 16 values.
template <int R, typename T>
static inline void weigh(float* acc, const f16v* p, const float* alpha, const T* v, int64_t dim, int keys) {
    for (int64_t d = 0; d < dim; d += 16) {
        f16v a[R];
        for (int r = 0; r < R; r++) a[r] = load(acc + r * dim + d) * alpha[r];
        for (int t = 0; t < keys; t++) {
            f16v value = load(v + t * dim + d);
            for (int r = 0; r < R; r++) a[r] += value * p[r][t];
        }
        for (int r = 0; r < R; r++) store(acc + r * dim + d, a[r]);
    }
}

struct Mask { float scale, softcap; int64_t window; };

// R rows of a tile meet 16 keys, the first of which is at position `first`.
template <int R, typename T>
static inline void meet(const T* q, const T* k, const T* v, const int64_t* pos, float* acc, float* top, float* mass,
                        int64_t first, int keys, int64_t dim, const Mask& m) {
    static const i16v lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    f16v s[R];
    float alpha[R];
    dots<R>(q, k, dim, s);
    for (int r = 0; r < R; r++) {
        s[r] *= m.scale;
        if (m.softcap > 0)
            for (int j = 0; j < 16; j++) s[r][j] = m.softcap * std::tanh(s[r][j] / m.softcap);
        i16v unseen = lane > int32_t(pos[r] - first);
        if (m.window > 0) unseen |= lane <= int32_t(pos[r] - first - m.window);
        s[r] = unseen ? splat(MASKED) : s[r];
        float peak = std::max(top[r], largest(s[r]));
        // Nothing seen yet: any finite reference will do, the masked lanes are cleared below.
        f16v p = vexp(s[r] - peak);
        s[r] = unseen ? splat(0) : p;
        alpha[r] = top[r] == peak ? 1.0f : std::exp(top[r] - peak);
        top[r] = peak;
        mass[r] = mass[r] * alpha[r] + sum(s[r]);
    }
    weigh<R>(acc, s, alpha, v, dim, keys);
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

template <typename T>
static void attention(const Iteration& it, const T* q, int64_t q_row, int64_t q_head, T* out, int64_t layer,
                      const Mask& m, const float* sinks) {
    const int64_t per_tile = std::max<int64_t>(1, MAX_ROWS / (it.q_heads / it.kv_heads));
    static thread_local std::vector<Tile> tiles;
    tiles.clear();
    for (int64_t s = 0; s < it.sequences; s++) {
        int64_t n = it.query_start[s + 1] - it.query_start[s];
        for (int64_t from = 0; from < n; from += per_tile)
            for (int64_t h = 0; h < it.kv_heads; h++)
                tiles.push_back({int32_t(s), int32_t(h), int32_t(from), int32_t(std::min(per_tile, n - from))});
    }
    const Tile* work = tiles.data();
    const int64_t n = tiles.size();
#pragma omp parallel for schedule(dynamic, 1) if (n > 1)
    for (int64_t i = 0; i < n; i++)
        attend_tile<T>(it, q, q_row, q_head, out, layer, work[i].seq, work[i].head, work[i].from, work[i].count, m,
                       sinks);
}

template <typename T>
static void write_kv(const Iteration& it, const T* k, const T* v, int64_t k_row, int64_t k_head, int64_t v_row,
                     int64_t v_head, int64_t layer) {
#pragma omp parallel for if (it.tokens * it.kv_heads * it.dim > SERIAL)
    for (int64_t t = 0; t < it.tokens; t++) {
        if (it.slots[t] < 0) continue;
        int64_t block = it.slots[t] / it.block_size, at = it.slots[t] % it.block_size;
        for (int64_t h = 0; h < it.kv_heads; h++) {
            T* keys = slab<T>(it, block, layer, 0, h);
            const T* key = k + t * k_row + h * k_head;
            for (int64_t d = 0; d < it.dim; d++) put_key(keys, at, it.dim, d, widen(key[d]));
            memcpy(slab<T>(it, block, layer, 1, h) + at * it.dim, v + t * v_row + h * v_head, it.dim * sizeof(T));
        }
    }
}

// Rotary embedding in the half-split form (Su et al. 2021, arXiv:2104.09864): q in place, k on its way to the cache.
template <typename T>
static void rotate_and_write(const Iteration& it, T* qkv, const float* cos, const float* sin, int64_t layer) {
    const int64_t dim = it.dim, half = dim / 2, row = (it.q_heads + 2 * it.kv_heads) * dim;
#pragma omp parallel for if (it.tokens * row > SERIAL)
    for (int64_t t = 0; t < it.tokens; t++) {
        T* q = qkv + t * row;
        const float *c = cos + t * dim, *s = sin + t * dim;
        for (int64_t h = 0; h < it.q_heads + it.kv_heads; h++) {
            T* x = q + h * dim;
            for (int64_t d = 0; d < half; d += 16) {
                f16v a = load(x + d), b = load(x + half + d);
                store(x + d, a * load(c + d) - b * load(s + d));
                store(x + half + d, b * load(c + half + d) + a * load(s + half + d));
            }
        }
        if (it.slots[t] < 0) continue;
        int64_t block = it.slots[t] / it.block_size, at = it.slots[t] % it.block_size;
        const T *k = q + it.q_heads * dim, *v = k + it.kv_heads * dim;
        for (int64_t h = 0; h < it.kv_heads; h++) {
            T* keys = slab<T>(it, block, layer, 0, h);
            for (int64_t d = 0; d < dim; d++) put_key(keys, at, dim, d, widen(k[h * dim + d]));
            memcpy(slab<T>(it, block, layer, 1, h) + at * dim, v + h * dim, dim * sizeof(T));
        }
    }
}

// RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467); with `residual`, residual += x first and is normalised.
template <typename T>
static void rms_norm(const T* x, T* residual, const T* weight, T* out, float eps, int64_t rows, int64_t width) {
#pragma omp parallel for if (rows * width > SERIAL)
    for (int64_t i = 0; i < rows; i++) {
        const T* row = x + i * width;
        f16v squares = splat(0);
        if (residual) {
            T* kept = residual + i * width;
            for (int64_t d = 0; d < width; d += 16) {
                f16v v = rounded<T>(load(kept + d) + load(row + d));
                store(kept + d, v);
                squares += v * v;
            }
            row = kept;
        } else {
            for (int64_t d = 0; d < width; d += 16) { f16v v = load(row + d); squares += v * v; }
        }
        float scale = 1.0f / std::sqrt(sum(squares) / float(width) + eps);
        for (int64_t d = 0; d < width; d += 16)
            store(out + i * width + d, load(weight + d) * rounded<T>(load(row + d) * scale));
    }
}

// SiLU(gate) * up, where a row of `x` is gate and up side by side.
template <typename T> static void silu_mul(const T* x, T* out, int64_t rows, int64_t width) {
#pragma omp parallel for if (rows * width > SERIAL)
    for (int64_t i = 0; i < rows; i++)
        for (int64_t d = 0; d < width; d += 16) {
            f16v gate = load(x + i * 2 * width + d), up = load(x + i * 2 * width + width + d);
            store(out + i * width + d, rounded<T>(gate / (1.0f + vexp(-gate))) * up);
        }
}

extern "C" {

void plait_attention(const Iteration* it, const void* q, int64_t q_row, int64_t q_head, void* out, int64_t layer,
                     float scale, int64_t window, float softcap, const float* sinks) {
    Mask m{scale, softcap, window};
    if (it->is_bf16) attention(*it, (const bf16*)q, q_row, q_head, (bf16*)out, layer, m, sinks);
    else attention(*it, (const float*)q, q_row, q_head, (float*)out, layer, m, sinks);
}

void plait_write_kv(const Iteration* it, const void* k, const void* v, int64_t k_row, int64_t k_head, int64_t v_row,
                    int64_t v_head, int64_t layer) {
    if (it->is_bf16) write_kv(*it, (const bf16*)k, (const bf16*)v, k_row, k_head, v_row, v_head, layer);
    else write_kv(*it, (const float*)k, (const float*)v, k_row, k_head, v_row, v_head, layer);
}

void plait_rotate_and_write(const Iteration* it, void* qkv, const float* cos, const float* sin, int64_t layer) {
    if (it->is_bf16) rotate_and_write(*it, (bf16*)qkv, cos, sin, layer);
    else rotate_and_write(*it, (float*)qkv, cos, sin, layer);
}

void plait_rms_norm(const void* x, void* residual, const void* w, void* out, float eps, int64_t rows, int64_t width,
                    int64_t is_bf16) {
    if (is_bf16) rms_norm((const bf16*)x, (bf16*)residual, (const bf16*)w, (bf16*)out, eps, rows, width);
    else rms_norm((const float*)x, (float*)residual, (const float*)w, (float*)out, eps, rows, width);
}

void plait_silu_mul(const void* x, void* out, int64_t rows, int64_t width, int64_t is_bf16) {
    if (is_bf16) silu_mul((const bf16*)x, (bf16*)out, rows, width);
    else silu_mul((const float*)x, (float*)out, rows, width);
}

int64_t plait_max_dim() { return MAX_DIM; }
int64_t plait_max_group() { return MAX_ROWS; }

}  // extern "C"
