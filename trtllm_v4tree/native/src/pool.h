// The threads of the library: one set for the process, shared by every session, so that sessions do not keep each other's threads off
// the cores. A worker waits on the core for a while after a job, since the next operator comes within microseconds, and then sleeps.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>

namespace v4tree {

int num_threads();                // how many threads an operator may use
void set_num_threads(int count);  // 0: one per processor of this process
void set_patience(int microseconds);  // how long an idle thread keeps its core

// body(argument, task) for every task in [0, tasks); returns when all are done. One caller at a time is helped, others run alone.
void run_tasks(int64_t tasks, void (*body)(void*, int64_t), void* argument);

// body(argument, member, size) once for every member of a team whose members all run at the same time, so that they may wait for each
// other (`wait_in_team`): `wanted` of them, fewer where other threads are asleep, help another caller or lately lost their cores to other
// programs; returns when all are done.
void run_team(int64_t wanted, void (*body)(void*, int64_t, int64_t), void* argument);
void team_waited(std::chrono::nanoseconds time);  // a member for others

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Returns when ready(), which another thread makes true.
template <class Ready>
void wait_until(const Ready& ready) {
  for (int spins = 0; !ready(); ++spins) {
    relax();
    if (spins > 1 << 14) std::this_thread::yield();
  }
}

template <class Ready>
void wait_in_team(const Ready& ready) {
  if (ready()) return;
  const auto since = std::chrono::steady_clock::now();
  wait_until(ready);
  team_waited(std::chrono::steady_clock::now() - since);
}

}  // namespace v4tree
