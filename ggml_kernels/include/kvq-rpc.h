// For ggml's RPC backend: sockets that notice when the other host is gone, and operations that only some hosts can do.
#pragma once

#include "kvq.h"

#include <algorithm>

#ifdef _WIN32
#  ifndef NOMINMAX
#    define NOMINMAX
#  endif
#  include <winsock2.h>
#else
#  include <netinet/in.h>
#  include <netinet/tcp.h>
#  include <sys/socket.h>
#endif

#ifndef MSG_NOSIGNAL
#  define MSG_NOSIGNAL 0   // a write to a closed connection is no signal, or the socket says so
#endif

// Asks the other side for a sign of life after 10 s of silence, three times, 5 s apart: without it a read waits forever when a host
// vanishes without a word.
template <typename socket_fd>
[[maybe_unused]] static void kvq_keep_alive(socket_fd fd) {
    const auto set = [fd](int level, int option, int value) { setsockopt(fd, level, option, (const char *) &value, sizeof(value)); };
    set(SOL_SOCKET, SO_KEEPALIVE, 1);
#ifdef SO_NOSIGPIPE
    set(SOL_SOCKET, SO_NOSIGPIPE, 1);
#endif
#ifdef TCP_KEEPIDLE
    set(IPPROTO_TCP, TCP_KEEPIDLE, 10);
    set(IPPROTO_TCP, TCP_KEEPINTVL, 5);
    set(IPPROTO_TCP, TCP_KEEPCNT, 3);
#endif
#ifdef TCP_USER_TIMEOUT
    set(IPPROTO_TCP, TCP_USER_TIMEOUT, 25000);   // ms that sent bytes may stay unacknowledged
#endif
}

// true for an operation that reads or writes a tensor of our types
[[maybe_unused]] static bool kvq_involves_cache_type(const ggml_tensor * op) {
    const auto ours = [](const ggml_tensor * t) { return t && (kvq_is_cache_type(t->type) || kvq_is_window_type(t->type)); };
    return ours(op) || std::any_of(op->src, op->src + GGML_MAX_SRC, ours);
}

// What a client asks about, with the sources that a backend reads without a look. No other operation touches our types.
[[maybe_unused]] static bool kvq_is_whole(const ggml_tensor * op) {
    int n;
    switch (op->op) {
        case GGML_OP_NONE: case GGML_OP_RESHAPE: case GGML_OP_VIEW: case GGML_OP_PERMUTE: case GGML_OP_TRANSPOSE: n = 0; break;
        case GGML_OP_DUP: case GGML_OP_CONT:                                                                      n = 1; break;
        case GGML_OP_CPY: case GGML_OP_GET_ROWS: case GGML_OP_SET_ROWS: case GGML_OP_MUL_MAT:                     n = 2; break;
        case GGML_OP_FLASH_ATTN_EXT:                                                                              n = 3; break;
        default: return false;
    }
    return std::all_of(op->src, op->src + n, [](const ggml_tensor * t) { return t != nullptr; });
}
