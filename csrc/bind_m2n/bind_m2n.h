// The parts of the module `antiphon._m2n`.
#pragma once

#include <nanobind/nanobind.h>

#include "bind_m2n/arguments.h"
#include "m2n/expert_split.h"

namespace antiphon::bind {

void bind_m2n_errors(nanobind::module_& module);
void bind_m2n_inbox(nanobind::module_& module);
void bind_m2n_outbox(nanobind::module_& module);
void bind_m2n_endpoint(nanobind::module_& module);
void bind_m2n_exchange(nanobind::module_& module);
void bind_m2n_rank_group(nanobind::module_& module);
void bind_m2n_expert_split(nanobind::module_& module);
void bind_m2n_libfabric(nanobind::module_& module);

// As tuples (expert, worker, gain).
nanobind::list wanted_copies(m2n::ExpertSplit& split, const Counts& counts, const Flags& open);

}  // namespace antiphon::bind
