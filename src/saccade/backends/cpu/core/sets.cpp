#include "sets.hpp"

#include <cstdlib>
#include <stdexcept>

#include "chip.hpp"

namespace saccade {

#define SACCADE_TABLES(isa)                  \
  const Kernels* kernels_##isa();            \
  const RecurrentKernels* recurrent_##isa(); \
  const DiagonalKernels* diagonal_##isa();
#define SACCADE_SET(name, isa, pairs) {name, kernels_##isa(), pairs, recurrent_##isa(), diagonal_##isa()}

#if defined(__x86_64__)
SACCADE_TABLES(base)
SACCADE_TABLES(v3)
SACCADE_TABLES(avx512)
const Kernels* kernels_avx512bf16();
#else
SACCADE_TABLES(neon)
#if defined(SACCADE_HAVE_NEONBF16)
const Kernels* kernels_neonbf16();
#endif
#endif

namespace {

std::vector<Set> runnable() {
  std::vector<Set> all;
  [[maybe_unused]] const Instructions chip = instructions();
#if defined(__x86_64__)
  if (chip.matrix) {
    all.push_back(SACCADE_SET("amx", avx512, kernels_avx512bf16()));
    all.back().matrix = true;
  }
  if (chip.pairs) all.push_back(SACCADE_SET("avx512bf16", avx512, kernels_avx512bf16()));
  if (chip.v4) all.push_back(SACCADE_SET("avx512", avx512, nullptr));
  if (chip.v3) all.push_back(SACCADE_SET("v3", v3, nullptr));
  all.push_back(SACCADE_SET("base", base, nullptr));
#else
#if defined(SACCADE_HAVE_NEONBF16)
  if (chip.pairs) all.push_back(SACCADE_SET("neonbf16", neon, kernels_neonbf16()));
#endif
  all.push_back(SACCADE_SET("neon", neon, nullptr));
#endif
  return all;
}

Set pick(const std::string& name) {
  std::string have;
  for (const Set& set : runnable()) {
    if (set.name == name) return set;
    have += std::string(have.empty() ? "" : ", ") + set.name;
  }
  throw std::invalid_argument("instruction set '" + name + "' cannot run here; this machine has: " + have);
}

// rare_pairs: whether pairs only serve matrix registers and decode of few rows, on chips where they are no faster
// otherwise; false if the set "avx512bf16" was asked for by name
struct Choice {
  Set set;
  bool rare_pairs;
};

Choice by_name(const std::string& name) {
  const Set set = pick(name);
  return {set, set.matrix};
}

Choice& current() {
  static Choice choice = [] {
    const char* forced = std::getenv("SACCADE_ISA");
    return forced && *forced ? by_name(forced) : Choice{runnable().front(), instructions().slow_pairs};
  }();
  return choice;
}

bool all_bf16(const Call& c) {
  return c.q.dtype == DType::bf16 && c.k.dtype == DType::bf16 && c.v.dtype == DType::bf16;
}
// The softmax of plain scores has only one multiplication left, which products of pairs need.
bool suit_pairs(const Call& c) { return all_bf16(c) && c.plain() && c.scale > 0; }

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Set& set : runnable()) names.push_back(set.name);
  return names;
}
void set_isa(const std::string& name) { current() = by_name(name); }
const Set& current_set() { return current().set; }

const Kernels& kernels_of(const Call& c) {
  const Choice& choice = current();
  return choice.set.pairs && !choice.rare_pairs && suit_pairs(c) ? *choice.set.pairs : *choice.set.kernels;
}

const Kernels& matrix_kernels_of(Call& c) {
  const Set& set = current().set;
  // fewer pairs cost less than filling the registers; results that ignore the batch have one way
  constexpr int64_t FEW_PAIRS = 512;
  const bool suits = c.Tq * c.Tk > FEW_PAIRS && !c.range && all_bf16(c);
  c.matrix = set.matrix && suits && (c.scale > 0 || !c.plain());
  return c.matrix ? *set.pairs : kernels_of(c);
}

const Kernels& decode_kernels_of(Call& c) {
  c.matrix = false;
  // results that ignore the batch have one way
  if (c.range) return kernels_of(c);
  // few rows read more than they compute, and pairs save widening the keys
  constexpr int64_t FEW_ROWS = 4, SIDE = 16;
  const Choice& choice = current();
  // whether pairs of keys can be read in place, by whole vectors
  const bool whole = c.D % 32 == 0 && c.Dv % 16 == 0, few = c.G * c.Tq <= FEW_ROWS;
  // whether the rows of a key head fill matrix registers
  c.matrix = choice.set.matrix && whole && c.G * c.Tq >= SIDE && suit_pairs(c);
  const bool pairs = choice.set.pairs && whole && (few || c.matrix || !choice.rare_pairs) && suit_pairs(c);
  return pairs ? *choice.set.pairs : *choice.set.kernels;
}

}  // namespace saccade
