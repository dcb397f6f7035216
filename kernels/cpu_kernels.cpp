// Attention and cache write as single calls, for models whose other parts are not ours. Plain C ABI.

#include <omp.h>

#include "cpu_attention.h"

static const int64_t SERIAL = 16384;  // elements below which a second thread costs more than it brings

template <typename T>
static void attention(const Iteration& it, const T* q, int64_t q_row, int64_t q_head, T* out, int64_t layer,
                      const Mask& m, const float* sinks) {
    const std::vector<Tile>& tiles = tiles_of(it, omp_get_max_threads());
    const Tile* work = tiles.data();
    const int64_t n = tiles.size();
#pragma omp parallel for schedule(dynamic, 1) if (n > 1)
    for (int64_t i = 0; i < n; i++)
        attend_tile<T>(it, q, q_row, q_head, out, layer, work[i], m, sinks);
}

template <typename T>
static void write_kv(const Iteration& it, const T* k, const T* v, int64_t k_row, int64_t k_head, int64_t v_row,
                     int64_t v_head, int64_t layer) {
#pragma omp parallel for if (it.tokens * it.kv_heads * it.dim > SERIAL)
    for (int64_t t = 0; t < it.tokens; t++)
        if (it.slots[t] >= 0) write_token(it, it.slots[t], layer, k + t * k_row, k_head, v + t * v_row, v_head);
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

int64_t plait_max_dim() { return MAX_DIM; }
int64_t plait_max_group() { return MAX_ROWS; }

}  // extern "C"
