// Arguments that several bindings take: timeouts, buffers, sets of sources.
//
// The parts of the module `antiphon._m2n`.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "m2n/inbox.h"
#include "m2n/outbox.h"
#include "m2n/row_scatter.h"
#include "m2n/token_exchange.h"
#include "m2n/types.h"

namespace antiphon::bind {

// `what`: what lasts so long, for the error.
inline int64_t nanoseconds(const char* what, double seconds) {
    if (seconds >= 0 && seconds <= 1e9) return static_cast<int64_t>(std::llround(seconds * 1e9));
    m2n::throw_invalid(what, " of ", seconds, " s: it must be 0 to 1e9");
}

inline m2n::Deadline deadline_after(double timeout_s) {
    return m2n::Deadline::after_ns(nanoseconds("a timeout", timeout_s));
}

// Runs `wait` without the GIL; a timeout's message gets the number of seconds.
template <class Wait>
auto within(double timeout_s, Wait&& wait) {
    const m2n::Deadline deadline = deadline_after(timeout_s);
    try {
        nanobind::gil_scoped_release release;
        return wait(deadline);
    } catch (const m2n::Error& error) {
        throw m2n::with_patience(error, timeout_s);
    }
}

// A contiguous buffer of bytes of any object that has one; writable only where asked for.
class Buffer {
  public:
    Buffer(nanobind::handle object, bool writable = false) {
        const int layout = writable ? PyBUF_CONTIG : PyBUF_CONTIG_RO;
        if (PyObject_GetBuffer(object.ptr(), &view_, layout | PyBUF_FORMAT) != 0) {
            PyErr_Clear();  // not every type has a format
            if (PyObject_GetBuffer(object.ptr(), &view_, layout) != 0) throw nanobind::python_error();
        }
        if (view_.format == nullptr || std::strchr(view_.format, 'O') == nullptr) return;
        PyBuffer_Release(&view_);
        throw nanobind::type_error("an array of Python objects holds addresses: give one of numbers or bytes");
    }
    ~Buffer() { PyBuffer_Release(&view_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    std::byte* data() const { return static_cast<std::byte*>(view_.buf); }
    uint64_t size() const { return static_cast<uint64_t>(view_.len); }

  private:
    Py_buffer view_{};
};

inline m2n::MessageLabel make_label(uint64_t step, const std::vector<uint32_t>& user, uint32_t participants) {
    if (user.size() > m2n::num_user_words) {
        m2n::throw_invalid(user.size(), " user words: a header holds ", m2n::num_user_words);
    }
    m2n::MessageLabel label{step, participants, {}};
    std::copy(user.begin(), user.end(), label.user);
    return label;
}

template <class T>
T* pointer_to(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

template <class Numbers>
nanobind::tuple tuple_of(const Numbers& numbers) {
    nanobind::list list;
    for (const auto number : numbers) list.append(number);
    return nanobind::tuple(list);
}

// Keeps `owned` for as long as the array that it is given to lives.
template <class Owned>
nanobind::capsule keeper_of(Owned owned) {
    auto* held = new Owned(std::move(owned));
    return nanobind::capsule(held, [](void* address) noexcept { delete static_cast<Owned*>(address); });
}

inline nanobind::bytes bytes_object(const std::vector<std::byte>& bytes) {
    return nanobind::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

[[noreturn]] inline void refuse_sources(const std::string& what, uint32_t num_sources) {
    m2n::throw_invalid(what, ": the inbox has ", num_sources);
}

inline m2n::SourceId source_of(int64_t source, uint32_t num_sources) {
    if (source < 0 || source >= num_sources) refuse_sources("source " + std::to_string(source), num_sources);
    return static_cast<m2n::SourceId>(source);
}

// As PyTorch names it.
inline m2n::RowType row_type_of(const std::string& name) {
    if (name == "bfloat16") return m2n::RowType::bf16;
    if (name == "float16") return m2n::RowType::fp16;
    if (name == "float32") return m2n::RowType::fp32;
    m2n::throw_invalid("rows of ", name, ": they can be bfloat16, float16 or float32");
}

// `expect`: how many sources, or which.
class ExpectedSources {
  public:
    ExpectedSources(nanobind::handle expect, uint32_t num_sources) {
        if (PyIndex_Check(expect.ptr()) && !PySequence_Check(expect.ptr())) {  // numpy's integers, too
            const int64_t count = index_of(expect);
            if (count < 0 || count > num_sources) {
                refuse_sources(std::to_string(count) + " sources are expected", num_sources);
            }
            count_ = static_cast<uint32_t>(count);
            return;
        }
        for (nanobind::handle item : nanobind::iter(expect)) {
            sources_.push_back(source_of(index_of(item), num_sources));
        }
        // A source named twice would be waited for twice, and sends once.
        std::ranges::sort(sources_);
        sources_.erase(std::ranges::unique(sources_).begin(), sources_.end());
    }
    m2n::Expected get() const { return {count_, sources_}; }

  private:
    static int64_t index_of(nanobind::handle number) {
        const Py_ssize_t value = PyNumber_AsSsize_t(number.ptr(), PyExc_OverflowError);
        if (value == -1 && PyErr_Occurred() != nullptr) throw nanobind::python_error();
        return value;
    }

    uint32_t count_ = 0;
    std::vector<m2n::SourceId> sources_;
};

// A step that is here, or (source, ticket) of a new attention worker, or None. Reads the inbox.
nanobind::object arrived_object(m2n::ExpertSide& side, const m2n::ExpertSide::Arrived& arrived);

void bind_m2n_endpoint(nanobind::module_& module);  // with inboxes and outboxes
void bind_m2n_exchange(nanobind::module_& module);  // with the split of copied experts
void bind_m2n_rank_group(nanobind::module_& module);
void bind_m2n_streams(nanobind::module_& module);

}  // namespace antiphon::bind
