// libcudnn.so.9: descriptors that hold what they are given, one engine for every graph, and workspaces of
// PHANTOM_CUDNN_WORKSPACE bytes. cuDNN's own choice of algorithm, and with it the bytes of its workspace, is not here.
#include <cudnn.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "device.h"

using namespace phantom;

namespace {

size_t workspace_bytes() {
  static const char* text = getenv("PHANTOM_CUDNN_WORKSPACE");
  return text ? strtoull(text, nullptr, 10) : 0;
}

size_t bytes_of(cudnnBackendAttributeType_t type) {
  switch (static_cast<int>(type)) {
    case CUDNN_TYPE_BOOLEAN: case CUDNN_TYPE_CHAR: return 1;
    case CUDNN_TYPE_HANDLE: case CUDNN_TYPE_INT64: case CUDNN_TYPE_DOUBLE: case CUDNN_TYPE_VOID_PTR:
    case CUDNN_TYPE_BACKEND_DESCRIPTOR: case CUDNN_TYPE_FRACTION: return 8;
    default: return 4;
  }
}

struct Attribute { int64_t count; std::vector<char> bytes; };
struct Backend {
  cudnnBackendDescriptorType_t type;
  std::map<int, Attribute> attributes;
};

struct Handle { cudaStream_t stream; };
struct Descriptor { int dims = 0; int type = 0; int format = 0; int sizes[16] = {}; int strides[16] = {}; };

template <typename T>
cudnnStatus_t make(T* made) {
  *made = reinterpret_cast<T>(new Descriptor);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t run(cudnnHandle_t handle, const char* name) {
  kernel(stream_of(reinterpret_cast<Handle*>(handle)->stream, current_device()), name);
  return CUDNN_STATUS_SUCCESS;
}

}  // namespace

extern "C" {

size_t cudnnGetVersion() { return CUDNN_VERSION; }
size_t cudnnGetMaxDeviceVersion() { return 1200; }
size_t cudnnGetCudartVersion() { return CUDART_VERSION; }
const char* cudnnGetErrorString(cudnnStatus_t status) { return status ? "CUDNN_STATUS_PHANTOM" : "CUDNN_STATUS_SUCCESS"; }
void cudnnGetLastErrorString(char* text, size_t most) { if (most) *text = 0; }
cudnnStatus_t cudnnGetProperty(libraryPropertyType which, int* value) {
  *value = which == MAJOR_VERSION ? CUDNN_MAJOR : which == MINOR_VERSION ? CUDNN_MINOR : CUDNN_PATCHLEVEL;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnCreate(cudnnHandle_t* made) { *made = reinterpret_cast<cudnnHandle_t>(new Handle{}); return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnSetStream(cudnnHandle_t h, cudaStream_t s) { reinterpret_cast<Handle*>(h)->stream = s; return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnGetStream(cudnnHandle_t h, cudaStream_t* s) { *s = reinterpret_cast<Handle*>(h)->stream; return CUDNN_STATUS_SUCCESS; }

cudnnStatus_t cudnnCreateTensorDescriptor(cudnnTensorDescriptor_t* made) { return make(made); }
cudnnStatus_t cudnnCreateFilterDescriptor(cudnnFilterDescriptor_t* made) { return make(made); }
cudnnStatus_t cudnnCreateConvolutionDescriptor(cudnnConvolutionDescriptor_t* made) { return make(made); }
cudnnStatus_t cudnnCreateActivationDescriptor(cudnnActivationDescriptor_t* made) { return make(made); }
cudnnStatus_t cudnnCreatePoolingDescriptor(cudnnPoolingDescriptor_t* made) { return make(made); }
cudnnStatus_t cudnnCreateDropoutDescriptor(cudnnDropoutDescriptor_t* made) { return make(made); }
cudnnStatus_t cudnnCreateRNNDescriptor(cudnnRNNDescriptor_t* made) { return make(made); }
cudnnStatus_t cudnnCreateRNNDataDescriptor(cudnnRNNDataDescriptor_t* made) { return make(made); }
cudnnStatus_t cudnnCreateCTCLossDescriptor(cudnnCTCLossDescriptor_t* made) { return make(made); }
cudnnStatus_t cudnnCreateSpatialTransformerDescriptor(cudnnSpatialTransformerDescriptor_t* made) { return make(made); }
cudnnStatus_t cudnnDropoutGetStatesSize(cudnnHandle_t, size_t* bytes) { *bytes = size_t{3} << 20; return CUDNN_STATUS_SUCCESS; }

cudnnStatus_t cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    cudnnHandle_t, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const cudnnTensorDescriptor_t,
    const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t,
    const cudnnActivationDescriptor_t, size_t* bytes) {
  *bytes = 0;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    cudnnHandle_t, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const cudnnTensorDescriptor_t,
    const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t,
    const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnActivationDescriptor_t, size_t* bytes) {
  *bytes = 0;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetBatchNormalizationTrainingExReserveSpaceSize(
    cudnnHandle_t, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const cudnnActivationDescriptor_t,
    const cudnnTensorDescriptor_t, size_t* bytes) {
  *bytes = 0;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetConvolutionForwardWorkspaceSize(
    cudnnHandle_t, const cudnnTensorDescriptor_t, const cudnnFilterDescriptor_t, const cudnnConvolutionDescriptor_t,
    const cudnnTensorDescriptor_t, cudnnConvolutionFwdAlgo_t, size_t* bytes) {
  *bytes = workspace_bytes();
  return CUDNN_STATUS_SUCCESS;
}

// -- the graph interface ----------------------------------------------------------------------------------------------

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t* made) {
  *made = reinterpret_cast<cudnnBackendDescriptor_t>(new Backend{type, {}});
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t made) {
  delete reinterpret_cast<Backend*>(made);
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t) { return CUDNN_STATUS_SUCCESS; }

cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t made, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t count, const void* values) {
  const auto* begin = static_cast<const char*>(values);
  auto& found = reinterpret_cast<Backend*>(made)->attributes[name];
  found.count = count;
  found.bytes.clear();
  if (begin && count > 0) found.bytes.assign(begin, begin + count * bytes_of(type));
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const made, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t wanted, int64_t* count, void* values) {
  const auto* backend = reinterpret_cast<Backend*>(made);
  int64_t none = 0;
  if (!count) count = &none;
  switch (static_cast<int>(name)) {
    case CUDNN_ATTR_ENGINEHEUR_RESULTS:
      // One configuration; the caller made the descriptor that it is written to.
      *count = 1;
      return CUDNN_STATUS_SUCCESS;
    case CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT:
      *count = 1;
      if (values) *static_cast<int64_t*>(values) = 1;
      return CUDNN_STATUS_SUCCESS;
    case CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE:
    case CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE:
      *count = 1;
      if (values) *static_cast<int64_t*>(values) = static_cast<int64_t>(workspace_bytes());
      return CUDNN_STATUS_SUCCESS;
    case CUDNN_ATTR_ENGINECFG_ENGINE:
      *count = 1;
      return CUDNN_STATUS_SUCCESS;
    default:
      break;
  }
  const auto found = backend->attributes.find(name);
  if (found == backend->attributes.end()) {
    *count = 0;
    if (values && wanted == 1) memset(values, 0, bytes_of(type));
    return CUDNN_STATUS_SUCCESS;
  }
  *count = found->second.count;
  if (values) memcpy(values, found->second.bytes.data(), std::min<size_t>(found->second.bytes.size(), std::max<int64_t>(wanted, 0) * bytes_of(type)));
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t, cudnnBackendDescriptor_t) {
  return run(handle, "cudnnBackendExecute");
}

}  // extern "C"
