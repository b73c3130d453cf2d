// What the files of libcudart.so share.
#pragma once
#include <cuda_runtime_api.h>

#include "device.h"

namespace phantom::runtime {

// Notes an error for cudaGetLastError, and returns it.
cudaError_t fail(cudaError_t error);
inline Stream* stream_at(cudaStream_t stream) { return stream_of(stream, current_device()); }
inline Event* event_at(cudaEvent_t event) { return reinterpret_cast<Event*>(event); }
// The memory of a variable of a kernel's; null: there is no such variable.
void* variable_at(const void* symbol);

}  // namespace phantom::runtime
