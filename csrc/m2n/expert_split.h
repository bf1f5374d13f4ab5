// How many rows each copy of an expert gets in this step, from the gate's counts: `antiphon/placement/split.py` in
// native code, where the method and what was rejected are told. Both give the same rows.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace antiphon::m2n {

class ExpertSplit {
  public:
    // `owners[e]`: the workers that hold expert e. `speeds`: of each worker, only ratios count; empty: equal. `knee`:
    // rows up to which an expert takes no longer than for one. Error(invalid): an expert without owner, or what is no
    // worker, speed or knee.
    ExpertSplit(uint32_t num_workers, const std::vector<std::vector<int32_t>>& owners, std::vector<double> speeds,
                uint32_t knee);

    uint32_t num_workers() const { return num_workers_; }
    uint32_t num_experts() const { return static_cast<uint32_t>(first_.size() - 1); }
    bool has_copies() const { return owners_.size() > num_experts(); }
    // Workers of an expert, in the order in which they were given.
    std::span<const int32_t> owners(uint32_t expert) const {
        return {owners_.data() + first_[expert], first_[expert + 1] - first_[expert]};
    }
    // Where the expert's owners begin among all of them.
    uint32_t first(uint32_t expert) const { return first_[expert]; }

    // `counts`: rows of each expert. The result, valid until the next call, has the rows of all owners of expert 0,
    // then those of expert 1, and so on. Allocates nothing.
    std::span<const uint32_t> split(std::span<const uint32_t> counts);

  private:
    double pour(uint32_t expert, double rows);
    void place_single();
    void place_whole(uint32_t expert, double rows);
    void make_whole(uint32_t expert, double rows);
    // Fills the loads `base` of `count` workers up to one level with `rows`; their parts come into `poured_`.
    void to_level(double rows, uint32_t count);
    double cost(double rows) const;

    uint32_t num_workers_;
    uint32_t knee_;
    std::vector<uint32_t> first_;
    std::vector<int32_t> owners_;
    std::vector<double> speeds_;
    std::vector<uint32_t> copied_;  // experts with more than one owner

    std::span<const uint32_t> counts_;
    std::vector<double> parts_, loads_;
    std::vector<uint32_t> rows_, order_;
    std::vector<uint32_t> kept_, by_time_;                   // of one expert's owners
    std::vector<double> base_, speed_, least_, times_, poured_;  // as `kept_`
};

}  // namespace antiphon::m2n
