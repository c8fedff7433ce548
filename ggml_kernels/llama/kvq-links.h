// Devices behind a network link.
#pragma once

#include "ggml-cpp.h"

#include <vector>

// False, with an error in the log, when the connection to a device behind ggml's RPC was lost: what was read from it is zeros.
// Waits for what such devices still compute.
bool kvq_links_hold(const std::vector<ggml_backend_ptr> & backends);
