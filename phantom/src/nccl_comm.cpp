#include "nccl_comm.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "device.h"

namespace phantom::nccl {
namespace {

// Tries in a row before a rank sleeps between them; how often it looks whether the others are there.
constexpr int kBusyTries = 100, kTriesPerLook = 200;
constexpr long kSleepNs = 100'000;

int64_t now_ns() {
  timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return at.tv_sec * 1'000'000'000LL + at.tv_nsec;
}

int64_t seconds(const char* name, int64_t otherwise) {
  const char* text = getenv(name);
  return text && *text ? strtoll(text, nullptr, 10) : otherwise;
}

// The lock of a process goes with it, even where its parent has not waited for it yet.
int locked(int file, int command, int rank) {
  struct flock range = {};
  range.l_type = F_WRLCK;
  range.l_whence = SEEK_SET;
  range.l_start = rank;
  range.l_len = 1;
  if (fcntl(file, command, &range)) return -1;
  return command == F_GETLK ? range.l_type != F_UNLCK : 1;
}

std::string words(const Call& call) {
  std::string said = std::string(call.name) + " of " + std::to_string(call.count) + " of type " + std::to_string(call.type);
  if (call.operation >= 0) said += ", reduction " + std::to_string(call.operation);
  if (call.root >= 0) said += ", root " + std::to_string(call.root);
  return said;
}

}  // namespace

Comm::Comm(const std::string& name, int count, int rank, int device) : name(name), count(count), rank(rank), device(device) {
  if (count < 1 || count > kMostRanks || rank < 0 || rank >= count)
    throw Failure("rank " + std::to_string(rank) + " of " + std::to_string(count) + ": there are 1 to 64 ranks");
  const size_t mailboxes = sizeof(Mailbox) * count * count;
  const size_t head = (sizeof(Shared) + mailboxes + 4095) / 4096 * 4096;
  bytes_ = head + count * kPartBytes + size_t(count) * count * kMessageBytes;
  file_ = shm_open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  // All ranks make it as large: whoever comes first finds it, and whatever was not written is 0.
  if (file_ < 0 || ftruncate(file_, static_cast<off_t>(bytes_)))
    throw Failure("cannot make /dev/shm" + name + ": " + strerror(errno));
  void* at = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  if (at == MAP_FAILED) throw Failure("cannot map /dev/shm" + name + ": " + strerror(errno));
  shared_ = static_cast<Shared*>(at);
  mailboxes_ = reinterpret_cast<Mailbox*>(shared_ + 1);
  parts_ = static_cast<char*>(at) + head;
  messages_ = parts_ + count * kPartBytes;
  locked(file_, F_SETLK, rank);
  Rank& own = shared_->ranks[rank];
  own.count = count;
  own.process = getpid();
  try {
    Wait wait(*this, "ncclCommInitRank");
    for (int each = 0; each < count; ++each) {
      while (!shared_->ranks[each].process) wait.once_more(each);
      if (shared_->ranks[each].count != count)
        throw Failure("rank " + std::to_string(each) + " has " + std::to_string(shared_->ranks[each].count) +
                      " ranks in its communicator, rank " + std::to_string(rank) + " has " + std::to_string(count));
    }
    exchange({});
  } catch (const Failure&) {
    shm_unlink(name.c_str());
    throw;
  }
  // All have it; nothing is left behind when they end.
  if (rank == 0) shm_unlink(name.c_str());
}

Comm::~Comm() {
  if (shared_) {
    leave();
    munmap(shared_, bytes_);
  }
  if (file_ >= 0) close(file_);
}

void Comm::fail(const std::string& why) {
  Guard guard(lock());
  if (failure_.empty()) failure_ = why;
}

std::string Comm::failure() {
  Guard guard(lock());
  return failure_;
}

bool Comm::is_gone(int each, std::string* how) {
  const Rank& other = shared_->ranks[each];
  const int process = other.process;
  if (!process) return false;
  *how = "rank " + std::to_string(each) + " of " + std::to_string(count) + " (process " + std::to_string(process) + ") ";
  if (other.has_left) {
    *how += "has left the communicator";
    return true;
  }
  *how += "has ended";
  return process != getpid() && locked(file_, F_GETLK, each) == 0;
}

void Comm::Wait::once_more(int each) {
  if (comm_.is_aborted) throw Failure(std::string(what_) + ": the communicator was aborted");
  if (!began_ns_) began_ns_ = now_ns();
  if (++num_tries_ < kBusyTries) {
    sched_yield();
    return;
  }
  const timespec pause = {0, kSleepNs};
  nanosleep(&pause, nullptr);
  if (num_tries_ % kTriesPerLook) return;
  std::string how;
  if (comm_.is_gone(each, &how)) throw Failure(std::string(what_) + ": " + how);
  // One that has never come may never have been started; one that has may have long work to do first.
  static const int64_t most_for_first = seconds("PHANTOM_NCCL_JOIN_SECONDS", 50);
  static const int64_t most = seconds("PHANTOM_NCCL_SECONDS", 600);
  const bool has_come = comm_.shared_->ranks[each].process != 0;
  const int64_t limit = has_come ? most : most_for_first;
  if (now_ns() - began_ns_ > limit * 1'000'000'000LL)
    throw Failure(std::string(what_) + ": rank " + std::to_string(each) + " of " + std::to_string(comm_.count) +
                  " did not come within " + std::to_string(limit) + " s (" +
                  (has_come ? "PHANTOM_NCCL_SECONDS" : "PHANTOM_NCCL_JOIN_SECONDS") + ")");
}

void Comm::require_alike(int other, const Call& theirs, const Call& own) {
  if (theirs == own) return;
  throw Failure("rank " + std::to_string(rank) + " calls " + words(own) + ", where rank " + std::to_string(other) +
                " calls " + words(theirs));
}

void Comm::give(const Call& call, const void* own, size_t bytes) {
  Wait wait(*this, call.name);
  Rank& self = shared_->ranks[rank];
  // A part is written over when all have read it.
  for (int each = 0; each < count; ++each)
    while (shared_->ranks[each].data.read < num_steps_) wait.once_more(each);
  self.call = call;
  if (own && bytes) memcpy(parts_ + rank * kPartBytes, own, bytes);
  self.data.given = num_steps_ + 1;
  for (int each = 0; each < count; ++each) {
    while (shared_->ranks[each].data.given <= num_steps_) wait.once_more(each);
    require_alike(each, shared_->ranks[each].call, call);
  }
}

bool Comm::send(int to, const Call& call, const void* from, size_t bytes) {
  Mailbox& box = mailbox(rank, to);
  if (box.received < box.sent) return false;
  box.call = call;
  if (from && bytes) memcpy(message(rank, to), from, bytes);
  ++box.sent;
  return true;
}

bool Comm::receive(int from, const Call& call, void* to, size_t bytes) {
  Mailbox& box = mailbox(from, rank);
  if (box.sent <= box.received) return false;
  require_alike(from, box.call, call);
  if (to && bytes) memcpy(to, message(from, rank), bytes);
  ++box.received;
  return true;
}

std::vector<Control> Comm::exchange(Control own) {
  Wait wait(*this, "ncclCommSplit");
  Rank& self = shared_->ranks[rank];
  for (int each = 0; each < count; ++each)
    while (shared_->ranks[each].control.read < num_exchanges_) wait.once_more(each);
  self.said = own;
  self.control.given = num_exchanges_ + 1;
  std::vector<Control> found;
  for (int each = 0; each < count; ++each) {
    while (shared_->ranks[each].control.given <= num_exchanges_) wait.once_more(each);
    found.push_back(shared_->ranks[each].said);
  }
  self.control.read = ++num_exchanges_;
  return found;
}

}  // namespace phantom::nccl
