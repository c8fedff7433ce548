// The header of saved states, see kvq-state.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "llama.h"

// A sequence state of this context around rows that somebody has put together: payload is what llama_state_seq_get_data writes
// behind the header, n bytes. Returns the size; written when dst is not null.
extern "C" LLAMA_API size_t llama_kvq_seal_state(const struct llama_context * ctx, uint8_t * dst, const uint8_t * payload, size_t n);

// What a state of this context begins with, its checksum still zero. Empty: the cache is none of our types, and has no header.
std::string kvq_state_header(const llama_context & ctx);

// Writes header and checksum to the front of data, behind which n_payload bytes lie. tokens: what a file keeps beside the
// state, n_tokens bytes, which the checksum covers too.
void kvq_state_seal(uint8_t * data, const std::string & header, size_t n_payload, const void * tokens = nullptr, size_t n_tokens = 0);

// Checks a saved state against this context; returns the length of its header. Throws std::runtime_error with the reason.
size_t kvq_state_open(const llama_context & ctx, const uint8_t * data, size_t size, const void * tokens = nullptr, size_t n_tokens = 0);
