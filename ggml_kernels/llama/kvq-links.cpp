#include "kvq-links.h"

#include "llama-impl.h"

#include <cstring>

bool kvq_links_hold(const std::vector<ggml_backend_ptr> & backends) {
    for (const auto & backend : backends) {
        ggml_backend_dev_t dev = ggml_backend_get_device(backend.get());
        const auto lost = dev ? (const char * (*)(ggml_backend_t)) ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(dev), "kvq_rpc_lost") : nullptr;
        if (!lost) {
            continue;
        }
        ggml_backend_synchronize(backend.get());
        if (const char * endpoint = lost(backend.get())) {
            LLAMA_LOG_ERROR("%s: the connection to RPC server %s was lost, and what it held; load the model again\n", __func__, endpoint);
            return false;
        }
    }
    return true;
}
