#include "bind/bind.h"

NB_MODULE(_native, module) {
    module.doc() = "Native CPU kernels and process-shared wait words. Addresses are plain integers.";
    antiphon::bind::bind_wait_word(module);
    antiphon::bind::bind_runtime(module);
    antiphon::bind::bind_linear(module);
    antiphon::bind::bind_experts(module);
    antiphon::bind::bind_kv_cache(module);
    antiphon::bind::bind_rows(module);
}
