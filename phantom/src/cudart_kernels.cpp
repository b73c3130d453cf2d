// libcudart.so: kernels, which are their names, and the way to the driver.
#include <cuda.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <unordered_map>
#include <vector>

#include "cudart.h"

using namespace phantom;
using namespace phantom::runtime;

namespace {

struct Variable {
  size_t bytes;
  void* at = nullptr;
};

struct Names {
  std::mutex lock;
  std::unordered_map<const void*, const char*> kernels;
  std::unordered_map<const void*, Variable> variables;
};

Names& names() {
  static auto* made = new Names;
  return *made;
}

const char* name_of(const void* kernel) {
  std::lock_guard guard(names().lock);
  const auto found = names().kernels.find(kernel);
  return found == names().kernels.end() ? "?" : found->second;
}

struct Configuration {
  dim3 grid, block;
  size_t shared_bytes;
  cudaStream_t stream;
};
thread_local std::vector<Configuration> configurations;

}  // namespace

void* phantom::runtime::variable_at(const void* symbol) {
  std::lock_guard guard(names().lock);
  const auto found = names().variables.find(symbol);
  if (found == names().variables.end()) return nullptr;
  if (!found->second.at) found->second.at = allocate(current_device(), found->second.bytes);
  return found->second.at;
}

extern "C" {

void** __cudaRegisterFatBinary(void* binary) { return new void*(binary); }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }

void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
  std::lock_guard guard(names().lock);
  names().kernels[function] = name;
}

void __cudaRegisterVar(void**, char* variable, char*, const char*, int, size_t bytes, int, int) {
  std::lock_guard guard(names().lock);
  names().variables[variable] = {bytes};
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream) {
  configurations.push_back({grid, block, shared_bytes, stream});
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  if (configurations.empty()) return fail(cudaErrorMissingConfiguration);
  const auto& last = configurations.back();
  *grid = last.grid;
  *block = last.block;
  *shared_bytes = last.shared_bytes;
  *static_cast<cudaStream_t*>(stream) = last.stream;
  configurations.pop_back();
  return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* found, const void* function) {
  *found = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  const char* name = name_of(function);
  // torch.cuda._sleep: as many cycles as it is told, at 1.5 GHz.
  const int64_t ns = strstr(name, "spin_kernel") ? *static_cast<int64_t*>(arguments[0]) * 2 / 3 : -1;
  kernel(stream_at(stream), name, ns);
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t function, dim3 g, dim3 b, void** a, size_t bytes, cudaStream_t stream) {
  return cudaLaunchKernel(reinterpret_cast<const void*>(function), g, b, a, bytes, stream);
}
cudaError_t cudaLaunchCooperativeKernel(const void* f, dim3 g, dim3 b, void** a, size_t bytes, cudaStream_t stream) {
  return cudaLaunchKernel(f, g, b, a, bytes, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void**) {
  kernel(stream_at(config->stream), name_of(function));
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  memset(found, 0, sizeof(*found));
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 32;
  found->ptxVersion = found->binaryVersion = card().binary;
  found->maxDynamicSharedSizeBytes = 49152;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int threads, size_t shared_bytes, unsigned) {
  int most = std::min(card().max_blocks, card().max_threads / std::max(threads, 1));
  if (shared_bytes) most = std::min<int>(most, card().shared_bytes / (shared_bytes + 1024));
  *blocks = std::max(most, 1);
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* f, int threads, size_t shared_bytes) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, f, threads, shared_bytes, 0);
}
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void*, const cudaLaunchConfig_t*) {
  *clusters = card().num_processors / 2;
  return cudaSuccess;
}

cudaError_t cudaLibraryLoadData(cudaLibrary_t* library, const void*, cudaJitOption*, void**, unsigned, cudaLibraryOption*, void**, unsigned) {
  *library = reinterpret_cast<cudaLibrary_t>(0x30);
  return cudaSuccess;
}
cudaError_t cudaLibraryGetKernel(cudaKernel_t* found, cudaLibrary_t, const char* name) {
  char* copied = strdup(name);
  std::lock_guard guard(names().lock);
  names().kernels[copied] = copied;
  *found = reinterpret_cast<cudaKernel_t>(copied);
  return cudaSuccess;
}

// -- the driver -------------------------------------------------------------------------------------------------------

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  if (!driver) driver = dlopen("libcuda.so.1", RTLD_NOW);
  for (const char* suffix : {"_v2", ""}) {
    *function = dlsym(driver, (std::string(name) + suffix).c_str());
    if (*function) break;
  }
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult* result) {
  return cudaGetDriverEntryPointByVersion(name, function, CUDART_VERSION, flags, result);
}

}  // extern "C"
