// A function that can stop in its middle: the threads of the host machines (tests/metal/host, tests/cuda/host).
#pragma once

#undef _FORTIFY_SOURCE
#include <setjmp.h>
#include <stddef.h>
#include <ucontext.h>

#include <memory>

namespace host {

class fibre {
    ucontext_t start;
    jmp_buf    at, caller;
    std::unique_ptr<char[]> stack;
    bool       started = false;

    static fibre *& starting() { static fibre * f; return f; }
    static void main() {
        fibre * f = starting();
        for (;;) {
            f->body(f);
            f->yield();
        }
    }

public:
    static constexpr size_t STACK = 256*1024;
    void (* body)(fibre *) = nullptr;       // runs again when it is resumed after its end

    // goes on where the fibre stopped, until it yields
    void resume() {
        if (_setjmp(caller)) {
            return;
        }
        if (started) {
            _longjmp(at, 1);
        }
        started = true;
        if (!stack) {
            stack.reset(new char[STACK]);
        }
        getcontext(&start);
        start.uc_stack.ss_sp   = stack.get();
        start.uc_stack.ss_size = STACK;
        start.uc_link = nullptr;
        starting() = this;
        makecontext(&start, main, 0);
        setcontext(&start);
    }
    void yield() {
        if (!_setjmp(at)) {
            _longjmp(caller, 1);
        }
    }
    // forgets where it stopped
    void restart() { started = false; }
};

} // namespace host
