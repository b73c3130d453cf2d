// libcudart.so: devices, their properties, and errors. What no file of these has is generated as a function that says
// success.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "cudart.h"

using namespace phantom;
using namespace phantom::runtime;

namespace {

thread_local cudaError_t last_error = cudaSuccess;
// In both directions at once, and to another device: what data center cards say.
constexpr int kCopyEngines = 3;

int attribute(cudaDeviceAttr which) {
  const Card& c = card();
  switch (static_cast<int>(which)) {
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrTotalConstantMemory: return 65536;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxPitch: return 2147483647;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrTextureAlignment: case cudaDevAttrSurfaceAlignment: return 512;
    case cudaDevAttrTexturePitchAlignment: return 32;
    case cudaDevAttrMultiProcessorCount: return c.num_processors;
    case cudaDevAttrL2CacheSize: return static_cast<int>(c.l2_bytes);
    case cudaDevAttrMaxThreadsPerMultiProcessor: return c.max_threads;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return c.max_blocks;
    case cudaDevAttrAsyncEngineCount: return kCopyEngines;
    case cudaDevAttrComputeCapabilityMajor: return c.major;
    case cudaDevAttrComputeCapabilityMinor: return c.minor;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return static_cast<int>(c.shared_bytes);
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return static_cast<int>(c.shared_optin_bytes);
    case cudaDevAttrReservedSharedMemoryPerBlock: return 1024;
    case cudaDevAttrClusterLaunch: return c.major >= 9;
    case cudaDevAttrConcurrentKernels: case cudaDevAttrUnifiedAddressing: case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrGpuOverlap: case cudaDevAttrStreamPrioritiesSupported: case cudaDevAttrGlobalL1CacheSupported:
    case cudaDevAttrLocalL1CacheSupported: case cudaDevAttrManagedMemory: case cudaDevAttrConcurrentManagedAccess:
    case cudaDevAttrComputePreemptionSupported: case cudaDevAttrCanUseHostPointerForRegisteredMem:
    case cudaDevAttrCooperativeLaunch: case cudaDevAttrHostRegisterSupported: case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrIpcEventSupport: case cudaDevAttrMemSyncDomainCount:
      return 1;
    case cudaDevAttrSingleToDoublePrecisionPerfRatio: return 2;
    default: return 0;
  }
}

}  // namespace

cudaError_t phantom::runtime::fail(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) { *count = num_devices(); return cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { *device = current_device(); return cudaSuccess; }

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= num_devices()) return fail(cudaErrorInvalidDevice);
  current_device() = device;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  if (device < 0 || device >= num_devices()) return fail(cudaErrorInvalidDevice);
  const Card& c = card();
  memset(p, 0, sizeof(*p));
  strncpy(p->name, c.name, sizeof(p->name) - 1);
  memcpy(p->uuid.bytes, "phantom-device-", 15);
  p->uuid.bytes[15] = static_cast<char>('0' + device);
  p->totalGlobalMem = c.total_bytes;
  p->sharedMemPerBlock = 49152;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->warpSize = 32;
  p->memPitch = 2147483647;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->major = c.major;
  p->minor = c.minor;
  p->textureAlignment = p->surfaceAlignment = 512;
  p->texturePitchAlignment = 32;
  p->multiProcessorCount = c.num_processors;
  p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = 1;
  p->pciBusID = 0x10 + device;
  p->asyncEngineCount = kCopyEngines;
  p->l2CacheSize = static_cast<int>(c.l2_bytes);
  p->maxThreadsPerMultiProcessor = c.max_threads;
  p->streamPrioritiesSupported = p->globalL1CacheSupported = p->localL1CacheSupported = 1;
  p->sharedMemPerMultiprocessor = c.shared_bytes;
  p->managedMemory = p->concurrentManagedAccess = p->computePreemptionSupported = 1;
  p->canUseHostPointerForRegisteredMem = p->cooperativeLaunch = 1;
  p->sharedMemPerBlockOptin = c.shared_optin_bytes;
  p->maxBlocksPerMultiProcessor = c.max_blocks;
  p->reservedSharedMemPerBlock = 1024;
  p->hostRegisterSupported = p->memoryPoolsSupported = p->ipcEventSupported = 1;
  p->clusterLaunch = c.major >= 9;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  *value = attribute(which);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  snprintf(text, length, "0000:%02X:00.0", 0x10 + device);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* most) {
  if (least) *least = 0;
  if (most) *most = -5;
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) { *can = device != peer; return cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { finish_all(); return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

cudaError_t cudaGetLastError() {
  const auto found = last_error;
  last_error = cudaSuccess;
  return found;
}
cudaError_t cudaPeekAtLastError() { return last_error; }

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    default: return "cudaErrorUnknown";
  }
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorNotSupported: return "operation not supported";
    default: return "unknown error";
  }
}

}  // extern "C"
