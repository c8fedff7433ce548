// The commit of llama.cpp that this library was built from: upstream's own ggml_commit() asks git and knows nothing here.
#include "llama-version.h"
#include "llama.h"

extern "C" LLAMA_API const char * llama_kvq_commit(void);

const char * llama_kvq_commit(void) {
    return LLAMA_COMMIT;
}
