// The threads of the library: one set for the process, shared by every session, so that sessions do not keep each other's threads off
// the cores. A worker waits on the core for a while after a job, since the next operator comes within microseconds, and then sleeps.
#pragma once

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
void team_was_late();

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

constexpr int kLate = 1 << 13;  // spins, a tenth of a millisecond: members wait for each other for microseconds

// Returns when ready(), which another thread makes true; whether that took long.
template <class Ready>
bool wait_until(const Ready& ready) {
  int spins = 0;
  for (; !ready(); ++spins) {
    relax();
    if (spins > 2 * kLate) std::this_thread::yield();
  }
  return spins > kLate;
}

template <class Ready>
void wait_in_team(const Ready& ready) {
  if (wait_until(ready)) team_was_late();
}

}  // namespace v4tree
