// What libc10_cuda.so calls of the CUDA runtime, the driver and NVML, without a GPU: addresses one behind (or before) the
// other up to a capacity, events that end on command, and virtual memory of which only the bytes are counted. Functions
// that the allocator never calls here are left out: they are bound at their first call.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr size_t kGranuleBytes = 2 << 20;

size_t variable(const char* name) {
  const char* text = getenv(name);
  if (!text) {
    fprintf(stderr, "%s is not set\n", name);
    abort();
  }
  return strtoull(text, nullptr, 10);
}

const size_t total_bytes = variable("STUB_TOTAL_BYTES");
const size_t capacity_bytes = variable("STUB_CAPACITY_BYTES");
const bool is_descending = variable("STUB_IS_DESCENDING");

size_t used_bytes = 0;
cudaError_t last_error = cudaSuccess;
std::map<void*, size_t> mallocs;
std::vector<uintptr_t> segments;

struct Event {
  cudaStream_t stream;
  long number;
};
std::map<cudaStream_t, long> num_recorded, num_done;

cudaError_t fail(cudaError_t error) { return last_error = error; }

bool take(size_t bytes) {
  if (used_bytes + bytes > capacity_bytes) return false;
  used_bytes += bytes;
  return true;
}

uintptr_t place(size_t bytes) {
  static uintptr_t cursor = 0x700000000000;
  const size_t span = (bytes + kGranuleBytes - 1) / kGranuleBytes * kGranuleBytes;
  segments.push_back(is_descending ? cursor -= span : cursor);
  if (!is_descending) cursor += span;
  return segments.back();
}

CUresult reserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  *address = place(bytes);
  return CUDA_SUCCESS;
}

// A handle is the number of its bytes: nothing else of it is ever asked for.
CUresult create(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp*, unsigned long long) {
  *handle = bytes;
  return take(bytes) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult release(CUmemGenericAllocationHandle handle) {
  used_bytes -= handle;
  return CUDA_SUCCESS;
}

CUresult granularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *bytes = kGranuleBytes;
  return CUDA_SUCCESS;
}

CUresult attribute(int* value, CUdevice_attribute, CUdevice) {
  *value = 0;
  return CUDA_SUCCESS;
}

CUresult current_context(CUcontext* context) {
  *context = reinterpret_cast<CUcontext>(1);
  return CUDA_SUCCESS;
}

CUresult succeed() { return CUDA_SUCCESS; }

}  // namespace

extern "C" {

// -- for the driver ---------------------------------------------------------------------------------------------------

void stub_finish(cudaStream_t stream) { num_done[stream] = num_recorded[stream]; }
const std::vector<uintptr_t>* stub_segments() { return &segments; }

// -- runtime ----------------------------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** address, size_t bytes) {
  if (!take(bytes)) return fail(cudaErrorMemoryAllocation);
  *address = reinterpret_cast<void*>(place(bytes));
  mallocs[*address] = bytes;
  return cudaSuccess;
}

cudaError_t cudaFree(void* address) {
  if (!address) return cudaSuccess;
  used_bytes -= mallocs.at(address);
  mallocs.erase(address);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = total_bytes;
  *free = std::min(capacity_bytes - used_bytes, total_bytes);
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  memset(properties, 0, sizeof(*properties));
  strcpy(properties->name, "stub");
  properties->totalGlobalMem = total_bytes;
  properties->major = 9;
  properties->multiProcessorCount = 1;
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new Event{});
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<Event*>(event);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  *reinterpret_cast<Event*>(event) = {stream, ++num_recorded[stream]};
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  const auto* recorded = reinterpret_cast<Event*>(event);
  return num_done[recorded->stream] >= recorded->number ? cudaSuccess : fail(cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  const auto* recorded = reinterpret_cast<Event*>(event);
  num_done[recorded->stream] = std::max(num_done[recorded->stream], recorded->number);
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
const char* cudaGetErrorString(cudaError_t) { return "stub error"; }
const char* cudaGetErrorName(cudaError_t) { return "stub"; }

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t* count) {
  if (id) *id = 0;
  if (count) *count = 0;
  return cudaStreamIsCapturing(stream, status);
}

cudaError_t cudaGetDeviceCount(int* count) { *count = 1; return cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { *device = 0; return cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* most) { *least = 0; *most = -5; return cudaSuccess; }

// -- driver -----------------------------------------------------------------------------------------------------------

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  static const std::map<std::string, void*> functions = {
      {"cuMemAddressReserve", reinterpret_cast<void*>(reserve)},
      {"cuMemCreate", reinterpret_cast<void*>(create)},
      {"cuMemRelease", reinterpret_cast<void*>(release)},
      {"cuMemGetAllocationGranularity", reinterpret_cast<void*>(granularity)},
      {"cuDeviceGetAttribute", reinterpret_cast<void*>(attribute)},
      {"cuCtxGetCurrent", reinterpret_cast<void*>(current_context)},
  };
  const auto found = functions.find(name);
  *function = found == functions.end() ? reinterpret_cast<void*>(succeed) : found->second;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// -- NVML: no other processes, no NVLink (3: not supported), no fabric -------------------------------------------------

struct FabricInfo {  // nvmlGpuFabricInfo_v2_t
  unsigned version;
  unsigned char cluster[16];
  int status;
  unsigned clique;
  unsigned char state;
};


int nvmlInit_v2() { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) { *device = reinterpret_cast<void*>(1); return 0; }
int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) { *count = 0; return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int* version) { *version = CUDART_VERSION; return 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType() { return 3; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2() { return 3; }
int nvmlDeviceGetGpuFabricInfoV(void*, FabricInfo* info) { info->state = 0; return 0; }

}  // extern "C"
