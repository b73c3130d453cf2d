// What the two parts of the phantom's cuDNN share: handles and descriptors of tensors.
#pragma once
#include <cudnn.h>

#include <algorithm>

#include "device.h"

namespace phantom {

struct Handle { cudaStream_t stream; };
struct Descriptor { int dims = 0; int type = 0; int format = 0; int sizes[16] = {}; int strides[16] = {}; };

inline cudnnStatus_t run(cudnnHandle_t handle, const char* name) {
  kernel(stream_of(reinterpret_cast<Handle*>(handle)->stream, current_device()), name);
  return CUDNN_STATUS_SUCCESS;
}

}  // namespace phantom
