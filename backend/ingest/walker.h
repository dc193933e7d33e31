// What walker.cpp stands on: bounds-checked reading of the protobuf wire, and columns in Arrow's layout.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the wire's fixed fields are read as they lie: little-endian machines only"
#endif

namespace walker {

struct Unusual {};  // thrown: the caller decodes with the protobuf library instead
using Text = std::string_view;
constexpr int PROBES_MAX = 64;

// --- the wire ---

struct Bytes {
    const uint8_t* at;
    const uint8_t* end;
    size_t size() const { return static_cast<size_t>(end - at); }
};

struct Field {
    uint64_t number = 0;
    unsigned wire = 0;
    uint64_t value = 0;
    Bytes bytes{};
    Text text() const { return {reinterpret_cast<const char*>(bytes.at), bytes.size()}; }
};

inline uint64_t varint(Bytes& in, int bytes_max) {
    uint64_t value = 0;
    for (int n = 0; n < bytes_max && in.at != in.end; ++n) {
        const uint8_t b = *in.at++;
        if (n == 9 && b > 1) break;
        value |= uint64_t(b & 0x7f) << (7 * n);
        if (b < 0x80) return value;
    }
    throw Unusual{};
}

template <class T> uint64_t fixed(Bytes& in) {
    if (in.size() < sizeof(T)) throw Unusual{};
    T value;
    std::memcpy(&value, in.at, sizeof value);
    in.at += sizeof value;
    return value;
}

inline bool next(Bytes& in, Field& f) {
    if (in.at == in.end) return false;
    const uint64_t tag = varint(in, 5);
    f.number = tag >> 3;
    f.wire = tag & 7;
    if (f.number == 0 || tag > UINT32_MAX) throw Unusual{};
    switch (f.wire) {
        case 0: f.value = varint(in, 10); break;
        case 1: f.value = fixed<uint64_t>(in); break;
        case 5: f.value = fixed<uint32_t>(in); break;
        case 2: {
            const uint64_t size = varint(in, 10);
            if (size > in.size()) throw Unusual{};
            f.bytes = {in.at, in.at + size};
            in.at += size;
            break;
        }
        default: throw Unusual{};
    }
    return true;
}

inline void check_utf8(Bytes in) {
    const uint8_t* s = in.at;
    while (s != in.end) {
        if (in.end - s >= 8) {
            uint64_t word;
            std::memcpy(&word, s, 8);
            if (!(word & 0x8080808080808080u)) { s += 8; continue; }
        }
        const uint8_t lead = *s++;
        if (lead < 0x80) continue;
        const int more = lead >= 0xf0 ? 3 : lead >= 0xe0 ? 2 : 1;
        if (lead < 0xc2 || lead > 0xf4 || in.end - s < more) throw Unusual{};
        const uint8_t low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
        const uint8_t high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
        if (*s < low || *s > high) throw Unusual{};
        for (int n = 1; n < more; ++n)
            if ((s[n] & 0xc0) != 0x80) throw Unusual{};
        s += more;
    }
}

// --- columns ---

inline uint64_t SEED = 0x9e3779b97f4a7c15u;  // set once, when the library is loaded

inline uint64_t hash(Text text) {
    uint64_t h = SEED ^ text.size() * 0xff51afd7ed558ccdu;
    for (size_t at = 0; at < text.size(); at += 8) {
        uint64_t word = 0;
        std::memcpy(&word, text.data() + at, std::min<size_t>(8, text.size() - at));
        h = (h ^ word) * 0xc4ceb9fe1a85ec53u;
        h ^= h >> 29;
    }
    return h ^ h >> 32;
}

struct Strings {  // Arrow's layout of a text or binary column
    std::vector<int32_t> ends{0};
    std::string bytes;
    void add(Text text) {
        if (bytes.size() + text.size() > INT32_MAX) throw Unusual{};
        bytes.append(text);
        ends.push_back(static_cast<int32_t>(bytes.size()));
    }
    Text at(size_t n) const { return Text(bytes).substr(ends[n], ends[n + 1] - ends[n]); }
    size_t size() const { return ends.size() - 1; }
};

struct Dictionary {  // texts that repeat, in the order of their first row
    std::vector<int32_t> index;
    Strings words;
    std::vector<int32_t> table = std::vector<int32_t>(64, -1);
    void add(Text text) {
        if (!index.empty() && words.at(index.back()) == text) { index.push_back(index.back()); return; }
        size_t probe = hash(text) & (table.size() - 1);
        for (int n = 0;; ++n, probe = (probe + 1) & (table.size() - 1)) {
            if (table[probe] < 0) break;
            if (words.at(table[probe]) == text) { index.push_back(table[probe]); return; }
            if (n > PROBES_MAX) throw Unusual{};
        }
        table[probe] = static_cast<int32_t>(words.size());
        index.push_back(table[probe]);
        words.add(text);
        if (words.size() * 2 > table.size()) grow();
    }
    void grow() {
        std::vector<int32_t> wider(table.size() * 4, -1);
        for (size_t n = 0; n < words.size(); ++n) {
            size_t probe = hash(words.at(n)) & (wider.size() - 1);
            while (wider[probe] >= 0) probe = (probe + 1) & (wider.size() - 1);
            wider[probe] = static_cast<int32_t>(n);
        }
        table.swap(wider);
    }
};

}  // namespace walker
