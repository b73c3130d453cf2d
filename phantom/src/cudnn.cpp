// libcudnn.so.9: descriptors that hold what they are given, one engine for every graph, and workspaces of
// PHANTOM_CUDNN_WORKSPACE bytes. Or, with PHANTOM_CUDNN=real, the descriptors of the wheel's own library: from the card's
// properties, which its graph interface takes instead of a device, it says which engines it would choose and what
// workspaces they ask for. Nothing of it runs.
#include <cudnn.h>
#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "cudnn_handle.h"

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

template <typename T>
cudnnStatus_t make(T* made) {
  *made = reinterpret_cast<T>(new Descriptor);
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

}  // extern "C"

namespace {

// The wheel's own library beside this one, for what it can say without a device.
struct Real {
  decltype(&::cudnnBackendCreateDescriptor) create;
  decltype(&::cudnnBackendDestroyDescriptor) destroy;
  decltype(&::cudnnBackendFinalize) finalize;
  decltype(&::cudnnBackendSetAttribute) set;
  decltype(&::cudnnBackendGetAttribute) get;
  cudnnBackendDescriptor_t card = nullptr;
  std::map<cudnnBackendDescriptor_t, cudnnBackendDescriptorType_t> kinds;

  explicit Real(const char* path) {
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) fail(dlerror());
    create = reinterpret_cast<decltype(create)>(dlsym(library, "cudnnBackendCreateDescriptor"));
    destroy = reinterpret_cast<decltype(destroy)>(dlsym(library, "cudnnBackendDestroyDescriptor"));
    finalize = reinterpret_cast<decltype(finalize)>(dlsym(library, "cudnnBackendFinalize"));
    set = reinterpret_cast<decltype(set)>(dlsym(library, "cudnnBackendSetAttribute"));
    get = reinterpret_cast<decltype(get)>(dlsym(library, "cudnnBackendGetAttribute"));
    const Card& each = phantom::card();
    // The members are those that the library asks for by name when one is missing.
    char text[2048];
    const int length = snprintf(
        text, sizeof(text),
        "{\"deviceName\": \"%s\", \"cudaDeviceId\": 0, \"deviceVer\": %d, \"driverVer\": %d, \"totalGlobalMem\": %zu, "
        "\"maxGridSize\": [2147483647, 65535, 65535], \"maxBlockSize\": [1024, 1024, 64], \"regsPerBlock\": 65536, "
        "\"multiProcessorCount\": %d, \"smClockRateKHz\": 1500000, \"memClockRateKHz\": 2500000, \"l2CacheSize\": %zu, "
        "\"warpSize\": 32, \"maxSharedMemoryPerBlock\": 49152, \"maxSharedMemoryPerBlockOptin\": %zu, "
        "\"reservedSharedMemoryPerBlock\": 1024, \"maxRegistersPerSM\": 65536, \"pciDeviceId\": 0, \"maxCtasPerSM\": %d, "
        "\"maxThreadsPerBlock\": 1024, \"maxThreadsPerSM\": %d, \"isTccDriver\": 0, \"supportCoopLaunch\": 1}",
        each.name, 100 * each.major + 10 * each.minor, CUDART_VERSION, each.total_bytes, each.num_processors,
        each.l2_bytes, each.shared_optin_bytes, each.max_blocks, each.max_threads);
    if (create(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, &card) ||
        set(card, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, length, text) || finalize(card))
      fail("it takes no card's properties");
  }

  [[noreturn]] static void fail(const char* why) {
    fprintf(stderr, "phantom: PHANTOM_CUDNN=real: %s\n", why);
    _exit(2);
  }
};

Real* real() {
  static const char* wanted = getenv("PHANTOM_CUDNN");
  static auto* found = wanted && strcmp(wanted, "real") == 0 ? new Real(PHANTOM_REAL_CUDNN) : nullptr;
  return found;
}

// Descriptors that know of the device through the handle know of it by the card's properties.
int property_of(cudnnBackendDescriptorType_t kind) {
  switch (kind) {
    case CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR: return CUDNN_ATTR_ENGINEHEUR_DEVICEPROP;
    case CUDNN_BACKEND_ENGINE_DESCRIPTOR: return CUDNN_ATTR_ENGINE_DEVICEPROP;
    case CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR: return CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP;
    default: return 0;
  }
}

}  // namespace

extern "C" {

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t* made) {
  if (real()) {
    const cudnnStatus_t status = real()->create(type, made);
    Guard guard(lock());
    if (!status) real()->kinds[*made] = type;
    return status;
  }
  *made = reinterpret_cast<cudnnBackendDescriptor_t>(new Backend{type, {}});
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t made) {
  if (real()) return real()->destroy(made);
  delete reinterpret_cast<Backend*>(made);
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t made) {
  if (!real()) return CUDNN_STATUS_SUCCESS;
  int property = 0;
  {
    Guard guard(lock());
    property = property_of(real()->kinds[made]);
  }
  if (property) real()->set(made, static_cast<cudnnBackendAttributeName_t>(property), CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &real()->card);
  return real()->finalize(made);
}

cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t made, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t count, const void* values) {
  if (real()) {
    // A handle of ours is none of its.
    if (type == CUDNN_TYPE_HANDLE) return CUDNN_STATUS_SUCCESS;
    return real()->set(made, name, type, count, values);
  }
  const auto* begin = static_cast<const char*>(values);
  auto& found = reinterpret_cast<Backend*>(made)->attributes[name];
  found.count = count;
  found.bytes.clear();
  if (begin && count > 0) found.bytes.assign(begin, begin + count * bytes_of(type));
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const made, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t wanted, int64_t* count, void* values) {
  if (real()) return real()->get(made, name, type, wanted, count, values);
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
