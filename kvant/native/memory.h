// Memory on cache-line boundaries that grows and never shrinks. Contents are lost when it grows.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

namespace kvant {

template <class T>
class Aligned {
 public:
  Aligned() = default;
  Aligned(const Aligned&) = delete;
  Aligned& operator=(const Aligned&) = delete;
  ~Aligned() { std::free(data_); }

  // Room for `count` elements, zeroed when it is new: padding that a kernel reads must at least be finite.
  void reserve(size_t count) {
    if (count <= size_) return;
    std::free(data_);
    size_ = 0;
    const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
    data_ = (T*)std::aligned_alloc(64, bytes);
    if (!data_) throw std::bad_alloc();
    __builtin_memset((void*)data_, 0, bytes);
    size_ = count;
  }

  T* data() const { return data_; }

 private:
  T* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace kvant
