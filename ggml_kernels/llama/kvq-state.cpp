// Saved states of caches of our types begin with a header: who wrote them, and a checksum of what follows. It is read before
// anything in the running context changes. Other caches keep llama.cpp's own format.
//
//   "KVQS", u32 length of the text, u64 length and u64 checksum of the rest, the text: one line for each thing that must agree
#include "kvq-metadata.h"
#include "kvq-state.h"
#include "kvq-llama.h"
#include "kvq.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-mmap.h"
#include "llama-model.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <stdexcept>

static constexpr char     MAGIC[]    = { 'K', 'V', 'Q', 'S' };
static constexpr int      LAYOUT     = 1;      // of the rows that follow
static constexpr size_t   FIXED      = 24;     // bytes before the text
static constexpr uint32_t MAX_TEXT   = 4096;
static constexpr uint64_t PRIMES[]   = { 0x9E3779B185EBCA87ull, 0xC2B2AE3D27D4EB4Full, 0x165667B19E3779F9ull };

static uint64_t rotate(uint64_t x, int n) {
    return x << n | x >> (64 - n);
}

// Four lanes of xxHash64's round (every step is a bijection, so no single changed word goes unseen), 8 bytes a step.
static uint64_t checksum(const uint8_t * data, size_t n, uint64_t seed) {
    uint64_t lanes[4] = { seed + PRIMES[0] + PRIMES[1], seed + PRIMES[1], seed, seed - PRIMES[0] };
    size_t i = 0;
    const auto round = [&](int lane, uint64_t word) {
        lanes[lane] = rotate(lanes[lane] + word*PRIMES[1], 31)*PRIMES[0];
    };
    for (; i + 32 <= n; i += 32) {
        for (int lane = 0; lane < 4; lane++) {
            uint64_t word;
            memcpy(&word, data + i + 8*lane, sizeof(word));
            round(lane, word);
        }
    }
    for (; i < n; i++) {
        round(i % 4, data[i] + 1);
    }
    uint64_t h = n*PRIMES[2];
    for (uint64_t lane : lanes) {
        h = rotate(h ^ lane, 27)*PRIMES[0] + PRIMES[2];
        h ^= h >> 29;
    }
    return h;
}

// Samples of the file, 64 spread over it: the norms alone would not tell a fine-tune from its base, and weights that a backend
// has repacked cannot be read back.
static std::string weights(const llama_model & model) {
    static std::mutex mutex;
    static std::map<std::string, std::string> known;   // by path and length
    if (model.kvq_path.empty()) {
        return kvq_fingerprint(model);
    }
    llama_file file(model.kvq_path.c_str(), "rb");
    std::lock_guard<std::mutex> lock(mutex);
    std::string & name = known[format("%zu %s", file.size(), model.kvq_path.c_str())];
    if (name.empty()) {
        uint64_t hash = file.size();
        std::vector<uint8_t> sample(std::min<size_t>(file.size(), 4096));
        for (uint64_t i = 0; i < 64; i++) {
            file.seek((file.size() - sample.size())/63*i, SEEK_SET);
            file.read_raw(sample.data(), sample.size());
            hash = checksum(sample.data(), sample.size(), hash);
        }
        name = format("%s %016llx", model.arch_name().c_str(), (unsigned long long) hash);
    }
    return name;
}

// Empty: no layer is of our types.
static std::string identity(const llama_context & ctx) {
    std::vector<llama_kvq_layer_info> layers(llama_kvq_cache_info(&ctx, nullptr, 0));
    llama_kvq_cache_info(&ctx, layers.data(), (int32_t) layers.size());

    std::map<std::string, int> types;
    uint64_t transforms = 0;
    bool ours = false;
    for (const auto & l : layers) {
        ours = ours || kvq_is_cache_type((ggml_type) l.type_k) || kvq_is_cache_type((ggml_type) l.type_v);
        types[format("K %s V %s", ggml_type_name((ggml_type) l.type_k), ggml_type_name((ggml_type) l.type_v))]++;
        transforms = checksum((const uint8_t *) &l.transform, sizeof(l.transform), transforms);
    }
    if (!ours) {
        return "";
    }
    std::string cache;
    for (const auto & [name, n] : types) {
        cache += format("%s%d x %s", cache.empty() ? "" : ", ", n, name.c_str());
    }
    const auto & c = ctx.get_cparams();
    return format("layout %d, tables %s\nmodel %s\ncache %s\ntransforms %016llx\nrope %g %g %g %g %g %g %u\n", LAYOUT, KVQ_CODEBOOK,
        weights(ctx.get_model()).c_str(), cache.c_str(), (unsigned long long) transforms, c.rope_freq_base, c.rope_freq_scale,
        c.yarn_ext_factor, c.yarn_attn_factor, c.yarn_beta_fast, c.yarn_beta_slow, c.n_ctx_orig_yarn);
}

std::string kvq_state_header(const llama_context & ctx) {
    const std::string text = identity(ctx);
    if (text.empty()) {
        return "";
    }
    const uint32_t length = (uint32_t) text.size();
    std::string header(FIXED, '\0');
    memcpy(&header[0], MAGIC, sizeof(MAGIC));
    memcpy(&header[4], &length, sizeof(length));
    return header + text;
}

void kvq_state_seal(uint8_t * data, const std::string & header, size_t n_payload, const void * tokens, size_t n_tokens) {
    if (header.empty()) {
        return;
    }
    const uint64_t size = n_payload;
    const uint64_t sum  = checksum(data + header.size(), n_payload, checksum((const uint8_t *) tokens, n_tokens, 0));
    memcpy(data, header.data(), header.size());
    memcpy(data + 8,  &size, sizeof(size));
    memcpy(data + 16, &sum,  sizeof(sum));
}

// the first line that differs, as "model: llama 1234, not llama 5678"
static std::string difference(const std::string & saved, const std::string & wanted) {
    std::istringstream a(saved), b(wanted);
    std::string x, y;
    while (std::getline(b, y)) {
        std::getline(a, x);
        if (x != y) {
            const size_t word = y.find(' ');
            return y.compare(0, word, x, 0, word) == 0 ? y.substr(0, word) + ":" + x.substr(word) + ", not" + y.substr(word) : "of another version";
        }
    }
    return "of another version";
}

size_t kvq_state_open(const llama_context & ctx, const uint8_t * data, size_t size, const void * tokens, size_t n_tokens) {
    const std::string header = kvq_state_header(ctx);
    const bool sealed = size >= sizeof(MAGIC) && memcmp(data, MAGIC, sizeof(MAGIC)) == 0;
    if (!sealed) {
        if (header.empty()) {
            return 0;
        }
        throw std::runtime_error("no saved state of such a cache: damaged, or saved with f16 or another of llama.cpp's types, or by an older version");
    }
    if (size < FIXED) {
        throw std::runtime_error("the state is cut off in its header");
    }
    uint32_t length;
    uint64_t n_payload, sum;
    memcpy(&length,    data + 4,  sizeof(length));
    memcpy(&n_payload, data + 8,  sizeof(n_payload));
    memcpy(&sum,       data + 16, sizeof(sum));
    if (length > MAX_TEXT || size - FIXED < length) {
        throw std::runtime_error("the state is damaged or cut off in its header");
    }
    const std::string text((const char *) data + FIXED, length);
    const size_t before = FIXED + length;
    if (header.empty()) {
        throw std::runtime_error("the state was saved with a cache of other types, which this context does not have");
    }
    if (text != header.substr(FIXED)) {
        throw std::runtime_error("the state was saved under another setting; " + difference(text, header.substr(FIXED)));
    }
    if (n_payload > size - before) {
        throw std::runtime_error(format("the state is cut off: %zu bytes of %llu", size - before, (unsigned long long) n_payload));
    }
    if (checksum(data + before, n_payload, checksum((const uint8_t *) tokens, n_tokens, 0)) != sum) {
        throw std::runtime_error("the state is damaged: its checksum does not match");
    }
    return before;
}

size_t llama_kvq_seal_state(const llama_context * ctx, uint8_t * dst, const uint8_t * payload, size_t n) {
    const std::string header = kvq_state_header(*ctx);
    if (dst) {
        memcpy(dst + header.size(), payload, n);
        kvq_state_seal(dst, header, n);
    }
    return header.size() + n;
}
