// Python's lock. Queued work may be a Python function, which takes the lock; so a thread that has it gives it up while it
// waits for its turn to do queued work, or two threads could wait for each other.
#pragma once
#include <dlfcn.h>

namespace phantom {

class WithoutGil {
 public:
  WithoutGil() {
    static const auto has = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
    static const auto runs = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "Py_IsInitialized"));
    static const auto save = reinterpret_cast<void* (*)()>(dlsym(RTLD_DEFAULT, "PyEval_SaveThread"));
    if (has && runs && save && runs() && has()) state_ = save();
  }
  ~WithoutGil() {
    static const auto restore = reinterpret_cast<void (*)(void*)>(dlsym(RTLD_DEFAULT, "PyEval_RestoreThread"));
    if (state_) restore(state_);
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  void* state_ = nullptr;
};

}  // namespace phantom
