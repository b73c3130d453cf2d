// libcudart.so: memory of devices and of the host, and copies.
#include <cstring>

#include "cudart.h"

using namespace phantom;
using namespace phantom::runtime;

namespace {

CopyKind kind_of(cudaMemcpyKind kind) {
  switch (kind) {
    case cudaMemcpyHostToHost: return CopyKind::kOnHost;
    case cudaMemcpyHostToDevice: return CopyKind::kToDevice;
    case cudaMemcpyDeviceToHost: return CopyKind::kToHost;
    case cudaMemcpyDeviceToDevice: return CopyKind::kOnDevice;
    default: return CopyKind::kNone;
  }
}

}  // namespace

extern "C" {

cudaError_t cudaMalloc(void** at, size_t bytes) {
  if (!bytes) { *at = nullptr; return cudaSuccess; }
  *at = allocate(current_device(), bytes);
  count("runtime", "cudaMalloc");
  return *at ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

cudaError_t cudaFree(void* at) {
  if (at) count("runtime", "cudaFree");
  return !at || free_memory(at) ? cudaSuccess : fail(cudaErrorInvalidValue);
}

cudaError_t cudaMallocAsync(void** at, size_t bytes, cudaStream_t) { return cudaMalloc(at, bytes); }
cudaError_t cudaFreeAsync(void* at, cudaStream_t) { return cudaFree(at); }

cudaError_t cudaMallocManaged(void** at, size_t bytes, unsigned) { return cudaMalloc(at, bytes); }

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = free_bytes(current_device());
  *total = card().total_bytes;
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** at, size_t bytes, unsigned) {
  count("runtime", "cudaHostAlloc");
  *at = allocate_host(bytes);
  return *at ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}
cudaError_t cudaMallocHost(void** at, size_t bytes) { return cudaHostAlloc(at, bytes, 0); }

cudaError_t cudaFreeHost(void* at) { return !at || free_host(at) ? cudaSuccess : fail(cudaErrorInvalidValue); }
cudaError_t cudaHostRegister(void* at, size_t bytes, unsigned) {
  count("runtime", "cudaHostRegister");
  return register_host(at, bytes) ? cudaSuccess : fail(cudaErrorHostMemoryAlreadyRegistered);
}
cudaError_t cudaHostUnregister(void* at) { return unregister_host(at) ? cudaSuccess : fail(cudaErrorInvalidValue); }
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) { *device = host; return cudaSuccess; }

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* at) {
  memset(found, 0, sizeof(*found));
  const int device = device_at(at);
  found->device = device;
  if (device >= 0) {
    found->type = cudaMemoryTypeDevice;
    found->devicePointer = const_cast<void*>(at);
  } else if (is_pinned(at)) {
    found->device = 0;
    found->type = cudaMemoryTypeHost;
    found->devicePointer = found->hostPointer = const_cast<void*>(at);
  } else {
    found->type = cudaMemoryTypeUnregistered;
    found->hostPointer = const_cast<void*>(at);
  }
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  copy(stream_at(stream), to, from, bytes, kind_of(kind));
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  copy(stream_at(nullptr), to, from, bytes, kind_of(kind));
  finish(stream_at(nullptr));
  return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t rows,
                              cudaMemcpyKind kind, cudaStream_t stream) {
  if (width && rows) copy_rows(stream_at(stream), to, to_pitch, from, from_pitch, width, rows, kind_of(kind));
  return cudaSuccess;
}

cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  copy(stream_at(stream), to, from, bytes, CopyKind::kOnDevice);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t stream) {
  if (bytes) fill(stream_at(stream), at, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* at, int value, size_t bytes) { return cudaMemsetAsync(at, value, bytes, nullptr); }

cudaError_t cudaGetSymbolAddress(void** at, const void* symbol) {
  *at = variable_at(symbol);
  return *at ? cudaSuccess : fail(cudaErrorInvalidValue);
}

cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  *pool = reinterpret_cast<cudaMemPool_t>(static_cast<uintptr_t>(0x100 + device));
  return cudaSuccess;
}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) {
  *static_cast<uint64_t*>(value) = card().total_bytes - context_bytes() - free_bytes(current_device());
  return cudaSuccess;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) { return fail(cudaErrorNotSupported); }
cudaError_t cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, unsigned) { return fail(cudaErrorNotSupported); }
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t*, cudaEvent_t) { return fail(cudaErrorNotSupported); }
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t*, cudaIpcEventHandle_t) { return fail(cudaErrorNotSupported); }

}  // extern "C"
