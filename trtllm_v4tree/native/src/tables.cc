// Tables of a pass for trees of up to 64 nodes: what `runtime/tables.py` makes, and says what it means, in a tenth of the time.
//
// Every function takes the sizes of the engine, integers one behind the other (`given`), and a buffer. It writes its arrays one behind the
// other, each from a multiple of kGrid bytes on, so that an array seldom moves when one before it grows, and the dimensions that a caller
// cannot know; it returns the bytes that they take, and writes no array if these are more than `capacity`. Nothing is kept.
#include <algorithm>
#include <cstdint>
#include <limits>

namespace v4tree {

namespace {

constexpr int64_t kMostNodes = 64, kPadding = -2, kGrid = 512;
constexpr int64_t kPrevA = 0, kCurA = 1, kCurB = 2, kCsaNull = 3, kCsaNodes = 4, kHcaOpen = 0, kHcaNull = 1, kHcaNodes = 2, kBinRow = 1;
constexpr float kUnseen = -std::numeric_limits<float>::infinity();

// A compressor: no ratio where the engine has no such layer.
struct Kind {
  int64_t ratio, page_rows;
  bool csa;
  int64_t null() const { return csa ? kCsaNull : kHcaNull; }
};

struct Sizes {
  int64_t window, max_commit, has_mtp, pages;
  Kind kinds[2];
  explicit Sizes(const int64_t* s)
      : window(s[0]), max_commit(s[1]), has_mtp(s[2]), pages(s[3]), kinds{{s[4], s[5], true}, {s[6], s[7], false}} {}
};

// Arrays one behind the other; without memory it only counts.
class Arena {
 public:
  explicit Arena(char* memory) : memory_(memory) {}
  template <class T>
  T* take(int64_t count) {
    char* at = memory_ == nullptr ? nullptr : memory_ + used;
    used += std::max<int64_t>(1, (count * static_cast<int64_t>(sizeof(T)) + kGrid - 1) / kGrid) * kGrid;
    return reinterpret_cast<T*>(at);
  }
  int64_t used = 0;

 private:
  char* memory_;
};

// `fill(arena)` with the memory, if it fits, and without it before.
template <class Fill>
int64_t laid_out(char* out, int64_t capacity, const Fill& fill) {
  Arena counted(nullptr);
  fill(counted);
  if (counted.used > capacity) return counted.used;
  Arena arena(out);
  fill(arena);
  return arena.used;
}

struct Tree {
  const int64_t* parents;
  int64_t nodes, depth[kMostNodes], height = 0;
  uint64_t reach[kMostNodes];  // bit k: node k is this node or above it

  Tree(const int64_t* parents, int64_t nodes) : parents(parents), nodes(nodes) {
    for (int64_t n = 0; n < nodes; ++n) {
      const int64_t up = parents[n];
      depth[n] = up >= 0 ? depth[up] + 1 : 0;
      reach[n] = (up >= 0 ? reach[up] : 0) | (up == kPadding ? 0 : uint64_t{1} << n);
      height = std::max(height, depth[n] + 1);
    }
  }
  bool sees(int64_t n, int64_t k) const { return reach[n] >> k & 1; }
};

// Nodes of a tree that complete a window, its root being at `phase`.
struct Ends {
  int64_t nodes[kMostNodes], count = 0, phase;
  Ends(const Tree& tree, const Kind& kind, int64_t length) : phase(length % kind.ratio) {
    if (phase + tree.height < kind.ratio) return;
    for (int64_t n = 0; n < tree.nodes; ++n)
      if (tree.parents[n] != kPadding && (phase + tree.depth[n] + 1) % kind.ratio == 0) nodes[count++] = n;
  }
  // Rows that the entry of an end pools.
  int64_t pooled(const Tree& tree, const Kind& kind, int64_t end) const {
    return kind.csa ? 2 * kind.ratio : 1 + std::min(kind.ratio, tree.depth[nodes[end]] + 1);
  }
};

int64_t most(const int64_t* values, int64_t count) { return *std::max_element(values, values + count); }

// The sink's zero row, then the rows of the last positions, newest first: [1 + held].
void window_rows(const Sizes& s, int64_t slot, int64_t length, int64_t held, int64_t* out) {
  out[0] = 0;
  int64_t at = (length + s.window - 1) % s.window;
  for (int64_t j = 0; j < held; ++j, at = at ? at - 1 : s.window - 1) out[1 + j] = j < length ? 1 + slot * s.window + at : 0;
}

// What a row `depth` behind the root sees of [sink | held rows]: [1 + held].
void held_mask(const Sizes& s, int64_t depth, int64_t length, int64_t held, float* out) {
  out[0] = 0.0f;
  const int64_t seen = std::max<int64_t>(0, std::min({held, length, s.window - 1 - depth}));
  std::fill_n(out + 1, seen, 0.0f);
  std::fill_n(out + 1 + seen, held - seen, kUnseen);
}

void pool_rows(const Tree& tree, const Kind& kind, const Ends& ends, int64_t end, int64_t width, int64_t* out) {
  const int64_t node = ends.nodes[end], ratio = kind.ratio, window = (ends.phase + tree.depth[node]) / ratio;
  std::fill_n(out, width, kind.null());
  if (kind.csa) {
    int64_t above = node;
    for (int64_t place = 2 * ratio - 1; place >= 0 && above >= 0; --place, above = tree.parents[above])
      out[place] = kCsaNodes + 2 * above + (place >= ratio);
    if ((window - 1) * ratio < ends.phase) out[0] = window == 0 ? kPrevA : kCurA;
    if (window * ratio < ends.phase) out[ratio] = kCurB;
  } else {
    int64_t above = node;
    for (int64_t place = ends.pooled(tree, kind, end) - 1; place >= 1; --place, above = tree.parents[above]) out[place] = kHcaNodes + above;
    out[0] = window * ratio < ends.phase ? kHcaOpen : kHcaNull;
  }
}

struct Batch {
  int64_t size, nodes;
  const int64_t *slots, *lengths, *parents, *rest;
  Batch(int64_t size, int64_t nodes, const int64_t* given)
      : size(size), nodes(nodes), slots(given), lengths(given + size), parents(given + 2 * size), rest(parents + size * nodes) {}
  Tree tree(int64_t b) const { return Tree(parents + b * nodes, nodes); }
};

// Dimensions of the tables of a kind: entries, ends, pooled rows.
void entry_dims(const Batch& batch, const Kind& kind, int64_t* dims) {
  dims[0] = most(batch.lengths, batch.size) / kind.ratio, dims[1] = 0, dims[2] = kind.csa ? 2 * kind.ratio : 1;
  for (int64_t b = 0; b < batch.size; ++b) {
    const Tree tree = batch.tree(b);
    const Ends ends(tree, kind, batch.lengths[b]);
    dims[1] = std::max(dims[1], ends.count);
    for (int64_t e = 0; e < ends.count; ++e) dims[2] = std::max(dims[2], ends.pooled(tree, kind, e));
  }
}

void entry_tables(const Sizes& s, const Batch& batch, const Kind& kind, const int64_t* pages, const int64_t* dims, Arena& arena) {
  const int64_t entries = dims[0], count = dims[1], width = dims[2], keys = entries + count;
  int64_t *rows = arena.take<int64_t>(batch.size * entries), *table = arena.take<int64_t>(batch.size * count * width);
  int64_t* positions = arena.take<int64_t>(batch.size * count);
  float* mask = arena.take<float>(batch.size * batch.nodes * keys);
  if (mask == nullptr) return;
  for (int64_t b = 0; b < batch.size; ++b) {
    const Tree tree = batch.tree(b);
    const Ends ends(tree, kind, batch.lengths[b]);
    const int64_t own = batch.lengths[b] / kind.ratio;
    for (int64_t e = 0, page = 0, row = 0; e < entries; ++e, ++row) {
      if (row == kind.page_rows) row = 0, ++page;
      rows[b * entries + e] = e < own ? pages[b * s.pages + page] * kind.page_rows + 1 + row : 0;
    }
    for (int64_t e = 0; e < count; ++e) {
      int64_t* to = table + (b * count + e) * width;
      if (e < ends.count)
        pool_rows(tree, kind, ends, e, width, to);
      else
        std::fill_n(to, width, kind.null());
      positions[b * count + e] = e < ends.count ? batch.lengths[b] + tree.depth[ends.nodes[e]] + 1 - kind.ratio : 0;
    }
    for (int64_t n = 0; n < batch.nodes; ++n) {
      float* to = mask + (b * batch.nodes + n) * keys;
      std::fill_n(to, own, 0.0f);
      std::fill_n(to + own, keys - own, kUnseen);
      for (int64_t e = 0; e < ends.count; ++e)
        if (tree.sees(n, ends.nodes[e])) to[entries + e] = 0.0f;
    }
  }
}

// Ring rows of positions start .. end - 1; the bin for those that the same commit overwrites.
void ring_rows(const Sizes& s, int64_t slot, int64_t start, int64_t end, int64_t* out) {
  for (int64_t p = start; p < end; ++p) out[p - start] = p < end - s.window ? kBinRow : 1 + slot * s.window + p % s.window;
}

void stream_rows(const Sizes& s, int64_t slot, int64_t start, int64_t end, int64_t* out) {
  for (int64_t p = start; p < end; ++p) out[p - start] = 1 + slot * s.max_commit + p % s.max_commit;
}

// Rows folded into the states of a sequence once the nodes of a path are committed: [3 (HCA: 1), width].
void fold_rows(const Kind& kind, const int64_t* path, int64_t count, int64_t phase, int64_t width, int64_t* out) {
  const int64_t ratio = kind.ratio, now = (phase + count) / ratio;
  std::fill_n(out, (kind.csa ? 3 : 1) * width, kind.null());
  if (!kind.csa) {
    const int64_t first = now * ratio - phase;
    if (first <= 0) out[0] = kHcaOpen;
    for (int64_t i = std::max<int64_t>(0, first), to = 1; i < count; ++i) out[to++] = kHcaNodes + path[i];
    return;
  }
  for (int64_t state = 0; state < 3; ++state, out += width) {
    const int64_t window = state == 0 ? now - 1 : now, half = state == 2, first = window * ratio - phase;
    int64_t to = 0;
    if (window == 0) out[to++] = half ? kCurB : kCurA;
    if (window == -1) out[to++] = kPrevA;
    for (int64_t i = std::max<int64_t>(0, first); i < std::min(count, first + ratio); ++i) out[to++] = kCsaNodes + 2 * path[i] + half;
  }
}

// Accepted ends of a kind and the entry rows that they go to; returns how many, -1 if a path is none of its tree. Only counts without memory.
int64_t emitted(const Sizes& s, const Batch& batch, const Kind& kind, const int64_t* counts, const int64_t* pages, int64_t most_ends,
                int64_t* source, int64_t* target) {
  int64_t total = 0;
  const int64_t* path = counts + batch.size;
  for (int64_t b = 0; b < batch.size; path += counts[b++]) {
    const int64_t length = batch.lengths[b];
    const Tree tree = batch.tree(b);
    const Ends ends(tree, kind, length);
    for (int64_t depth = kind.ratio - 1 - length % kind.ratio; depth < counts[b]; depth += kind.ratio, ++total) {
      const int64_t* end = std::find(ends.nodes, ends.nodes + ends.count, path[depth]);
      if (end == ends.nodes + ends.count) return -1;
      if (source == nullptr) continue;
      const int64_t entry = (length + depth) / kind.ratio;
      source[total] = b * most_ends + (end - ends.nodes);
      target[total] = 1 + pages[b * s.pages + entry / kind.page_rows] * kind.page_rows + entry % kind.page_rows;
    }
  }
  return total;
}

}  // namespace
}  // namespace v4tree

#define V4_EXPORT extern "C" __attribute__((visibility("default")))

// given: slots [B], lengths [B], parents [B, N], tokens [B, N]; pages [B, pages] -> token_ids, positions, slots, window_rows, node_mask, and of
// each kind rows, pool_table, entry_positions, mask; dims: 1 + held rows, then of each kind entries, ends, pooled rows
V4_EXPORT int64_t v4tree_step_tables(const int64_t* sizes, int64_t size, int64_t nodes, const int64_t* given, const int64_t* pages, char* out,
                                     int64_t capacity, int64_t* dims) {
  using namespace v4tree;
  const Sizes s(sizes);
  const Batch batch(size, nodes, given);
  const int64_t held = std::min(most(batch.lengths, size), s.window - 1), keys = 1 + held + nodes;
  dims[0] = 1 + held;
  for (int k = 0; k < 2; ++k)
    if (s.kinds[k].ratio) entry_dims(batch, s.kinds[k], dims + 1 + 3 * k);
  return laid_out(out, capacity, [&](Arena& arena) {
    int64_t *tokens = arena.take<int64_t>(size * nodes), *positions = arena.take<int64_t>(size * nodes), *slots = arena.take<int64_t>(size);
    int64_t* rows = arena.take<int64_t>(size * (1 + held));
    float* mask = arena.take<float>(size * nodes * keys);
    for (int64_t b = 0; b < size && mask != nullptr; ++b) {
      const Tree tree = batch.tree(b);
      slots[b] = batch.slots[b];
      window_rows(s, batch.slots[b], batch.lengths[b], held, rows + b * (1 + held));
      for (int64_t n = 0; n < nodes; ++n) {
        const int64_t at = b * nodes + n;
        tokens[at] = batch.rest[at], positions[at] = batch.lengths[b] + tree.depth[n];
        held_mask(s, tree.depth[n], batch.lengths[b], held, mask + at * keys);
        for (int64_t k = 0; k < nodes; ++k)
          mask[at * keys + 1 + held + k] = tree.sees(n, k) && tree.depth[n] - tree.depth[k] < s.window ? 0.0f : kUnseen;
      }
    }
    for (int k = 0; k < 2; ++k)
      if (s.kinds[k].ratio) entry_tables(s, batch, s.kinds[k], pages, dims + 1 + 3 * k, arena);
  });
}

// given: slots [B], lengths [B], parents [B, N], how many nodes of each path are kept [B], these nodes; pages [B, pages] -> accepted,
// window_dst, stream_dst (with a drafter), and of each kind fold_table, emitted, dst; dims: accepted rows, then of each kind folded rows,
// emitted entries. -1: what is committed is no path of the tree.
V4_EXPORT int64_t v4tree_commit_tables(const int64_t* sizes, int64_t size, int64_t nodes, const int64_t* given, const int64_t* pages,
                                       char* out, int64_t capacity, int64_t* dims) {
  using namespace v4tree;
  const Sizes s(sizes);
  const Batch batch(size, nodes, given);
  const int64_t *counts = batch.rest, *paths = counts + size, longest = most(counts, size);
  int64_t ends[2] = {};
  dims[0] = 0;
  for (int64_t b = 0; b < size; ++b) dims[0] += counts[b];
  for (int k = 0; k < 2; ++k) {
    if (!s.kinds[k].ratio) continue;
    int64_t own[3];
    entry_dims(batch, s.kinds[k], own);
    ends[k] = own[1];
    dims[1 + 2 * k] = 1 + std::min(longest, s.kinds[k].ratio);
    dims[2 + 2 * k] = emitted(s, batch, s.kinds[k], counts, pages, ends[k], nullptr, nullptr);
    if (dims[2 + 2 * k] < 0) return -1;
  }
  return laid_out(out, capacity, [&](Arena& arena) {
    int64_t *accepted = arena.take<int64_t>(dims[0]), *ring = arena.take<int64_t>(dims[0]);
    int64_t* streams = s.has_mtp ? arena.take<int64_t>(dims[0]) : nullptr;
    const int64_t* path = paths;
    for (int64_t b = 0, at = 0; b < size && accepted != nullptr; at += counts[b], path += counts[b], ++b) {
      const int64_t slot = batch.slots[b], start = batch.lengths[b], end = start + counts[b];
      for (int64_t i = 0; i < counts[b]; ++i) accepted[at + i] = b * nodes + path[i];
      ring_rows(s, slot, start, end, ring + at);
      if (streams != nullptr) stream_rows(s, slot, start, end, streams + at);
    }
    for (int k = 0; k < 2; ++k) {
      const Kind& kind = s.kinds[k];
      if (!kind.ratio) continue;
      const int64_t width = dims[1 + 2 * k], states = kind.csa ? 3 : 1;
      int64_t *fold = arena.take<int64_t>(size * states * width), *source = arena.take<int64_t>(dims[2 + 2 * k]);
      int64_t* target = arena.take<int64_t>(dims[2 + 2 * k]);
      if (fold == nullptr) continue;
      path = paths;
      for (int64_t b = 0; b < size; path += counts[b++])
        fold_rows(kind, path, counts[b], batch.lengths[b] % kind.ratio, width, fold + b * states * width);
      emitted(s, batch, kind, counts, pages, ends[k], source, target);
    }
  });
}

// given: slots [B], lengths [B], unread rows [B], the token behind each of these -> stream_rows, next_tokens, positions, mtp_window_rows,
// catchup_mask, with steps last_row and root_position, with two and more level_mask, and for the commit mtp_accepted, mtp_dst; dims: 1 + held
// rows, most unread rows, all unread rows
V4_EXPORT int64_t v4tree_draft_tables(const int64_t* sizes, int64_t size, int64_t steps, const int64_t* given, const int64_t*, char* out,
                                      int64_t capacity, int64_t* dims) {
  using namespace v4tree;
  const Sizes s(sizes);
  const int64_t *slots = given, *lengths = given + size, *unread = lengths + size, width = most(unread, size);
  int64_t latest = 0, all = 0;
  for (int64_t b = 0; b < size; ++b) latest = std::max(latest, lengths[b] - unread[b]), all += unread[b];
  const int64_t held = std::min(latest, s.window - 1), keys = 1 + held + width, levels = std::max<int64_t>(0, steps - 1);
  dims[0] = 1 + held, dims[1] = width, dims[2] = all;
  return laid_out(out, capacity, [&](Arena& arena) {
    int64_t *streams = arena.take<int64_t>(size * width), *next = arena.take<int64_t>(size * width);
    int64_t *positions = arena.take<int64_t>(size * width), *rows = arena.take<int64_t>(size * (1 + held));
    float* catchup = arena.take<float>(size * width * keys);
    int64_t *last = steps ? arena.take<int64_t>(size) : nullptr, *root = steps ? arena.take<int64_t>(size) : nullptr;
    float* level = levels ? arena.take<float>(size * levels * keys) : nullptr;
    int64_t *read = arena.take<int64_t>(all), *ring = arena.take<int64_t>(all);
    if (read == nullptr) return;
    const int64_t* token = unread + size;
    for (int64_t b = 0; b < size; token += unread[b++]) {
      const int64_t count = unread[b], start = lengths[b] - count, at = b * width;
      for (int64_t i = 0; i < width; ++i) {
        streams[at + i] = 0, next[at + i] = i < count ? token[i] : 0, positions[at + i] = i < count ? start + i : start;
        float* mask = catchup + (at + i) * keys;
        held_mask(s, i, start, held, mask);
        for (int64_t k = 0; k < width; ++k) mask[1 + held + k] = k <= i && i - k < s.window ? 0.0f : kUnseen;
      }
      stream_rows(s, slots[b], start, lengths[b], streams + at);
      window_rows(s, slots[b], start, held, rows + b * (1 + held));
      if (steps) last[b] = count - 1, root[b] = lengths[b];
      for (int64_t l = 0; l < levels; ++l) {
        float* mask = level + (b * levels + l) * keys;
        held_mask(s, count + l, start, held, mask);
        for (int64_t k = 0; k < width; ++k) mask[1 + held + k] = k < count && count + l - k < s.window ? 0.0f : kUnseen;
      }
      for (int64_t i = 0; i < count; ++i) *read++ = at + i;
      ring_rows(s, slots[b], start, lengths[b], ring);
      ring += count;
    }
  });
}
