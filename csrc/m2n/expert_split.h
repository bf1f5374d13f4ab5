// How many rows each copy of an expert gets in this step, from the gate's counts, and which further copies these counts
// would want. `antiphon/placement/split.py` has the methods and what was rejected; its rows are
// the same.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace antiphon::m2n {

// A copy of `expert` for `worker`. `gain`: rows that the fullest worker would be spared, this copy's part of it.
struct WantedCopy {
    uint32_t expert = 0;
    uint32_t worker = 0;
    double gain = 0;
};

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

    // `counts`: rows of each expert. Error(invalid): not as many as experts. The result, valid until the next call, has
    // the rows of all owners of expert 0, then those of expert 1, and so on. Allocates nothing.
    std::span<const uint32_t> split(std::span<const uint32_t> counts);

    // Copies worth having for `counts`, at most one for each worker of which `open` is true. Nothing if the fullest
    // worker cannot be spared a knee of rows.
    std::vector<WantedCopy> wanted_copies(std::span<const uint32_t> counts, std::span<const bool> open);

  private:
    double pour(uint32_t expert, double rows);
    void place_single();
    void place_whole(uint32_t expert, double rows);
    void make_whole(uint32_t expert, double rows);
    // Fills the loads `base` of `count` workers up to one level with `rows`; their parts come into `poured_`.
    void to_level(double rows, uint32_t count);
    // The largest part of `giver` whose expert `taker` does not hold; null: there is none.
    struct Part {
        uint32_t expert = 0;
        double rows = 0;
    };
    Part* largest_part(uint32_t giver, uint32_t taker);
    bool holds(uint32_t worker, uint32_t expert) const;
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
    std::vector<std::vector<Part>> parts_of_;  // by worker, for `wanted_copies`
};

}  // namespace antiphon::m2n
