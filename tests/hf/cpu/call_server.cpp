// Calls functions of libraries for processes that cannot load them: reads calls from its input and writes what they left to its
// output, until the input ends. Numbers are 64 bits wide, least byte first, but for floats and what is in buffers.
//
//   call     text library, text function, buffers, places, arguments, count, floats [count]
//   buffers  count, then each: size, bytes
//   places   count, then each: buffer, offset in it, and the buffer and offset whose address is written there
//   arguments  count, then each: buffer, number; an address in that buffer, or the number itself if the buffer is -1
//   answer   what the function returned, then the bytes of all buffers
//
// A call passes whole numbers and addresses in one row of registers and floats in another, then on the stack (Procedure
// Call Standard for the Arm 64-bit Architecture, 6.8.2). So one signature fits all functions whose floats come last.

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

constexpr size_t MOST_NUMBERS = 16, MOST_FLOATS = 2;
using Number = int64_t;
using Function = Number (*)(Number, Number, Number, Number, Number, Number, Number, Number, Number, Number, Number, Number,
                            Number, Number, Number, Number, float, float);

[[noreturn]] static void fail(const char* what) {
  std::fprintf(stderr, "call server: %s\n", what);
  std::exit(1);
}

static bool read(void* to, size_t bytes) { return std::fread(to, 1, bytes, stdin) == bytes; }

static Number read_number() {
  Number number;
  if (!read(&number, sizeof number)) fail("the input ends within a call");
  return number;
}

struct Buffer {
  size_t bytes;
  void* at;
};

static std::string read_text(size_t bytes) {
  std::string text(bytes, 0);
  if (!read(text.data(), bytes)) fail("the input ends within a call");
  return text;
}

int main() {
  for (Number length; read(&length, sizeof length);) {
    const std::string library = read_text(length), name = read_text(read_number());
    void* opened = dlopen(library.c_str(), RTLD_NOW);
    if (!opened) fail(dlerror());
    const auto function = reinterpret_cast<Function>(dlsym(opened, name.c_str()));
    if (!function) fail(dlerror());

    std::vector<Buffer> buffers(read_number());
    for (Buffer& buffer : buffers) {
      buffer.bytes = read_number();
      buffer.at = std::malloc(buffer.bytes + 1);
      if (!read(buffer.at, buffer.bytes)) fail("the input ends within a call");
    }
    const auto address = [&](Number buffer, Number offset) { return reinterpret_cast<Number>(buffers.at(buffer).at) + offset; };
    for (Number places = read_number(); places > 0; --places) {
      const Number buffer = read_number(), offset = read_number(), target = read_number();
      const Number pointer = address(target, read_number());
      std::memcpy(static_cast<char*>(buffers.at(buffer).at) + offset, &pointer, sizeof pointer);
    }
    Number numbers[MOST_NUMBERS] = {};
    float floats[MOST_FLOATS] = {};
    const size_t count = read_number();
    if (count > MOST_NUMBERS) fail("too many arguments");
    for (size_t i = 0; i < count; ++i) {
      const Number buffer = read_number(), number = read_number();
      numbers[i] = buffer < 0 ? number : address(buffer, number);
    }
    const size_t float_count = read_number();
    if (float_count > MOST_FLOATS || !read(floats, float_count * sizeof *floats)) fail("too many floats");

    const Number* n = numbers;
    const Number result = function(n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], n[12], n[13],
                                   n[14], n[15], floats[0], floats[1]);
    std::fwrite(&result, sizeof result, 1, stdout);
    for (const Buffer& buffer : buffers) {
      std::fwrite(buffer.at, 1, buffer.bytes, stdout);
      std::free(buffer.at);
    }
    std::fflush(stdout);
  }
}
