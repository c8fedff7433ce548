// The first error line of libllama on this thread: what follows it tells only what failed because of it.
#include "kvq-llama.h"

#include <cstring>
#include <string>

static thread_local std::string first_error;

void kvq_record_error(ggml_log_level level, const char * text) {
    if (level == GGML_LOG_LEVEL_ERROR && first_error.empty()) {
        const char * cause = strstr(text, ": ");         // after the name of the function
        first_error = cause ? cause + 2 : text;
        first_error.erase(first_error.find_last_not_of('\n') + 1);
    }
}

const char * llama_kvq_first_error(bool forget) {
    if (forget) {
        first_error.clear();
    }
    return first_error.c_str();
}
