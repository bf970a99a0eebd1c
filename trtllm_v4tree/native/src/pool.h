// The threads of the library: one set for the process, shared by every session, so that sessions do not keep each other's threads off
// the cores. A worker waits on the core for a while after a job, since the next operator comes within microseconds, and then sleeps.
#pragma once

#include <cstddef>
#include <cstdint>

namespace v4tree {

int num_threads();                // how many threads an operator may use
void set_num_threads(int count);  // 0: one per processor of this process
void set_patience(int microseconds);  // how long an idle thread keeps its core

// body(argument, task) for every task in [0, tasks); returns when all are done. One caller at a time is helped, others run alone.
void run_tasks(int64_t tasks, void (*body)(void*, int64_t), void* argument);

}  // namespace v4tree
