// All decoder layers of a Llama-like model over one ragged iteration, in one call: RMSNorm, rotary attention over the
// paged cache, RMSNorm, SiLU-gated MLP. The residual stream stays in float32.

#include "cpu_attention.h"
#include "cpu_gemm.h"

extern "C" {

struct Layer {
    Packed qkv, out, gate_up, down;
    const float *qkv_bias, *norm, *mlp_norm;  // qkv_bias may be null
    int64_t window;                           // 0 for none
};

struct Decoder {
    const Layer* layers;
    double* seconds;  // by phase, added up over all calls
    int64_t count, hidden, inner, threads;
    float eps, scale;
};

enum Phase { NORM, PRODUCT, ROTARY, ATTENTION };

}  // extern "C"

// RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467).
template <typename T>
static inline void normalize(const float* x, const float* weight, T* out, float eps, int64_t width) {
    f16v squares = splat(0);
    for (int64_t d = 0; d < width; d += 16) { f16v v = load(x + d); squares += v * v; }
    const float scale = 1.0f / std::sqrt(sum(squares) / float(width) + eps);
    for (int64_t d = 0; d < width; d += 16) store(out + d, load(x + d) * scale * load(weight + d));
}

// Rotary embedding in the half-split form (Su et al. 2021, arXiv:2104.09864) of a token's q in place and of its k,
// which goes to the cache with v.
template <typename T>
static inline void rotate_and_write(const Iteration& it, T* qkv, const float* cos, const float* sin, int64_t t,
                                    int64_t layer) {
    const int64_t dim = it.dim, half = dim / 2;
    for (int64_t h = 0; h < it.q_heads + it.kv_heads; h++) {
        T* x = qkv + h * dim;
        for (int64_t d = 0; d < half; d += 16) {
            f16v a = load(x + d), b = load(x + half + d);
            store(x + d, a * load(cos + d) - b * load(sin + d));
            store(x + half + d, b * load(cos + half + d) + a * load(sin + half + d));
        }
    }
    if (it.slots[t] < 0) return;
    write_token(it, it.slots[t], layer, qkv + it.q_heads * dim, dim, qkv + (it.q_heads + it.kv_heads) * dim, dim);
}

// Where the time goes, as the first thread of the team sees it: its waiting for the others is part of each phase.
class Watch {
  public:
    explicit Watch(double* seconds) : seconds_(omp_get_thread_num() ? nullptr : seconds), at_(omp_get_wtime()) {}
    void lap(Phase phase) {
        if (!seconds_) return;
        const double now = omp_get_wtime();
        seconds_[phase] += now - at_;
        at_ = now;
    }

  private:
    double* seconds_;
    double at_;
};

template <typename T>
static void forward(const Decoder& m, const Iteration& it, float* hidden, const float* cos, const float* sin) {
    static thread_local std::vector<T> memory;
    const int64_t rows = it.tokens, wide = m.hidden, q_width = it.q_heads * it.dim;
    const int64_t qkv_width = q_width + 2 * it.kv_heads * it.dim;
    if (int64_t(memory.size()) < rows * (wide + qkv_width + q_width + m.inner))
        memory.resize(rows * (wide + qkv_width + q_width + m.inner));
    T *normed = memory.data(), *qkv = normed + rows * wide, *attended = qkv + rows * qkv_width;
    T* inner = attended + rows * q_width;
    const std::vector<Tile>& tiles = tiles_of(it, m.threads);
    Team team;
#pragma omp parallel num_threads(m.threads)
    for (int64_t l = 0; l < m.count; l++) {
        Watch watch(m.seconds);
        const Layer& layer = m.layers[l];
        const Mask mask{m.scale, 0, layer.window};
        auto add = [&](int64_t row, int64_t at, f16v a, f16v b) {
            float* h = hidden + row * wide + at;
            store(h, load(h) + a);
            if (at + 16 < wide) store(h + 16, load(h + 16) + b);
        };
        team.share(rows, 4, [&](int64_t t) {
            normalize(hidden + t * wide, layer.norm, normed + t * wide, m.eps, wide);
        });
        watch.lap(NORM);
        gemm(team, normed, rows, wide, layer.qkv, (qkv_width + PANEL - 1) / PANEL,
             [&](int64_t row, int64_t at, f16v a, f16v b) {
                 const bool both = at + 16 < qkv_width;
                 if (layer.qkv_bias) {
                     a += load(layer.qkv_bias + at);
                     if (both) b += load(layer.qkv_bias + at + 16);
                 }
                 store(qkv + row * qkv_width + at, a);
                 if (both) store(qkv + row * qkv_width + at + 16, b);
             });
        watch.lap(PRODUCT);
        team.share(rows, 4, [&](int64_t t) {
            rotate_and_write(it, qkv + t * qkv_width, cos + t * it.dim, sin + t * it.dim, t, l);
        });
        watch.lap(ROTARY);
        team.share(tiles.size(), 1, [&](int64_t i) {
            attend_tile<T>(it, qkv, qkv_width, it.dim, attended, l, tiles[i], mask, nullptr);
        });
        watch.lap(ATTENTION);
        gemm(team, attended, rows, q_width, layer.out, (wide + PANEL - 1) / PANEL, add);
        watch.lap(PRODUCT);
        team.share(rows, 4, [&](int64_t t) {
            normalize(hidden + t * wide, layer.mlp_norm, normed + t * wide, m.eps, wide);
        });
        watch.lap(NORM);
        // A panel holds 16 gates and the 16 ups that belong to them.
        gemm(team, normed, rows, wide, layer.gate_up, m.inner / 16,
             [&](int64_t row, int64_t at, f16v gate, f16v up) {
                 store(inner + row * m.inner + at / 2, gate / (1.0f + vexp(-gate)) * up);
             });
        gemm(team, inner, rows, m.inner, layer.down, (wide + PANEL - 1) / PANEL, add);
        watch.lap(PRODUCT);
    }
}

template <typename T>
static void linear(const T* x, const Packed& w, float* out, int64_t rows, int64_t in, int64_t outputs, int64_t threads) {
    Team team;
#pragma omp parallel num_threads(threads)
    gemm(team, x, rows, in, w, (outputs + PANEL - 1) / PANEL, [&](int64_t row, int64_t at, f16v a, f16v b) {
        float* y = out + row * outputs + at;
        if (at + 16 <= outputs) store(y, a);
        else for (int64_t i = 0; at + i < outputs; i++) y[i] = a[i];
        if (at + 32 <= outputs) store(y + 16, b);
        else for (int64_t i = 16; at + i < outputs; i++) y[i] = b[i - 16];
    });
}

extern "C" {

// hidden [T, H] float32, changed in place; cos, sin [T, D] float32.
void plait_forward(const Decoder* m, const Iteration* it, float* hidden, const float* cos, const float* sin) {
    if (it->is_bf16) forward<bf16>(*m, *it, hidden, cos, sin);
    else forward<float>(*m, *it, hidden, cos, sin);
}

// out [rows, outputs] float32 = x [rows, in] times packed weights.
void plait_linear(const void* x, const Packed* w, float* out, int64_t rows, int64_t in, int64_t outputs, int64_t threads,
                  int64_t is_bf16) {
    if (is_bf16) linear((const bf16*)x, *w, out, rows, in, outputs, threads);
    else linear((const float*)x, *w, out, rows, in, outputs, threads);
}

}  // extern "C"
