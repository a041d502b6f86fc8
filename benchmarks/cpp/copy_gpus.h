// Every GPU alone, then all at once: GPUs may share a switch or a socket's link.
#pragma once

#include <memory>
#include <vector>

#include "base/thread_pool.h"
#include "copy_session.h"
#include "device/backend.h"
#include "table.h"

namespace megatrain::bench {

Table copies_by_gpu(const std::vector<std::shared_ptr<Backend>>& gpus, ThreadPool& pool,
                    const CopySizes& sizes);

}  // namespace megatrain::bench
