// Vectors of 512 bits in software, for tests of what is written for processors that have them. Put before a source by the
// compiler's `-include`. The compiler's own header must be read first: it takes the word as its leave to use the instructions.

#pragma once

#include <immintrin.h>

#ifndef __AVX512F__
#define __AVX512F__ 1
#endif
