// OTLP protobuf bodies to columns, for backend/ingest/walker.py.
//
// It takes what is common and says "unusual" to everything else: the caller then decodes with the protobuf library,
// whose answer is the rule. So nothing here has to know how to refuse a body, and a body that is taken here gives
// the very rows that the library's way gives. Every read is bounds-checked against the body; the body is never
// written; all memory is in standard containers. The tables of field kinds come from the message descriptors.

#include "walker.h"

#include <charconv>
#include <cmath>
#include <memory>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using namespace walker;

enum Kind : uint8_t { UNKNOWN, VARINT, FIXED64, FIXED32, STRING, BYTES, PACKED = 8, MESSAGE = 16 };
enum Signal { TRACES, METRICS, LOGS };
// the order of walker.py's NAMES
enum Slot { STEP, SEQUENCE, LAMPORT, MONOTONIC, GROUP_SEQUENCE, BYTE_COUNT, NUMBERS, NAME = NUMBERS, GROUP, DTYPE, LABEL,
            EVENT_NAME, SLOTS };
// the order of walker.py's _LIMITS
enum Limit { TEXT_MAX, BODY_MAX, KEY_MAX, VALUE_MAX, ATTRIBUTES_MAX, RECORDS_MAX, STEP_MAX, MAP_BYTES_MAX, LIMITS };
constexpr int FIELDS = 64, DEPTH_MAX = 16;
constexpr int64_t DEFAULTS[NUMBERS] = {-1, -1, -1, 0, -1, 0};

struct Rows {
    size_t count = 0;
    std::vector<int64_t> block_rows;
    std::vector<int64_t> numbers[NUMBERS];
    std::vector<int64_t> start, end;
    std::vector<double> value;
    std::vector<int32_t> severity;
    Dictionary kind, name, group, dtype, label, unit;
    Strings trace_id, span_id, body, keys, values;
    std::vector<int32_t> map_ends{0};
};

struct Any {
    enum { NONE, STRING, BOOL, INT, DOUBLE, BYTES } kind = NONE;
    Text text;
    int64_t number = 0;
    double real = 0;
};

struct Pair { Text key, value; };

// --- the walk ---

struct Walker {
    std::vector<uint8_t> kinds;
    uint8_t root;
    Signal signal;
    std::string names[SLOTS];
    int64_t limit[LIMITS];

    uint8_t kind(uint8_t message, uint64_t field) const { return field < FIELDS ? kinds[message * FIELDS + field] : 0; }
    uint8_t message(uint8_t of, uint64_t field) const { return kind(of, field) - MESSAGE; }
};

class Walk {
    const Walker& w;
    Rows& out;
    std::vector<Pair> extra;               // of the resource, for every row of the block
    std::vector<Pair> rest;                // of this row
    std::vector<std::unique_ptr<std::string>> made;  // texts made of numbers, alive until the row is written
    Any slots[SLOTS];
    bool given[SLOTS];

    void check(uint8_t message, Bytes in, int depth) {
        if (depth > DEPTH_MAX) throw Unusual{};
        Field f;
        while (next(in, f)) check(w.kind(message, f.number), f, depth);
    }

    void check(uint8_t kind, const Field& f, int depth) {
        if (kind == UNKNOWN) return;
        if (kind >= MESSAGE) {
            if (f.wire != 2) throw Unusual{};
            check(uint8_t(kind - MESSAGE), f.bytes, depth + 1);
            return;
        }
        const uint8_t scalar = kind & 7;
        if ((kind & PACKED) && f.wire == 2) {
            Bytes in = f.bytes;
            const size_t width = scalar == FIXED64 ? 8 : 4;
            if (scalar != VARINT && in.size() % width) throw Unusual{};
            while (scalar == VARINT && in.at != in.end) varint(in, 10);
            return;
        }
        constexpr unsigned wires[] = {0, 0, 1, 5, 2, 2};
        if (f.wire != wires[scalar]) throw Unusual{};
        if (scalar == STRING) check_utf8(f.bytes);
    }

    static void want(const Field& f, unsigned wire) {
        if (f.wire != wire) throw Unusual{};
    }

    Text text(const Field& f, Limit bound) {
        want(f, 2);
        check_utf8(f.bytes);
        if (f.bytes.size() > static_cast<size_t>(w.limit[bound])) throw Unusual{};
        return f.text();
    }

    static int64_t time(const Field& f) {
        want(f, 1);
        if (f.value > INT64_MAX) throw Unusual{};
        return static_cast<int64_t>(f.value);
    }

    Any any(uint8_t message, Bytes in) {
        Any found;
        Field f;
        while (next(in, f)) {
            if (w.kind(message, f.number) == UNKNOWN) continue;
            if (found.kind != Any::NONE) throw Unusual{};
            switch (f.number) {
                case 1: want(f, 2); check_utf8(f.bytes); found.kind = Any::STRING; found.text = f.text(); break;
                case 2: want(f, 0); found.kind = Any::BOOL; found.number = f.value != 0; break;
                case 3: want(f, 0); found.kind = Any::INT; found.number = static_cast<int64_t>(f.value); break;
                case 4: want(f, 1); found.kind = Any::DOUBLE; std::memcpy(&found.real, &f.value, 8); break;
                case 7: want(f, 2); found.kind = Any::BYTES; found.text = f.text(); break;
                default: throw Unusual{};
            }
        }
        return found;
    }

    Text keep(std::string text) {
        made.push_back(std::make_unique<std::string>(std::move(text)));
        return *made.back();
    }

    // as Python's json.dumps writes it
    Text shown(const Any& value) {
        char buffer[32];
        switch (value.kind) {
            case Any::STRING: return value.text;
            case Any::BOOL: return value.number ? "true" : "false";
            case Any::INT: return keep({buffer, std::to_chars(buffer, buffer + 32, value.number).ptr});
            case Any::DOUBLE: return keep(real(value.real));
            case Any::BYTES: {
                std::string hex;
                for (const char c : value.text) {
                    hex += "0123456789abcdef"[uint8_t(c) >> 4];
                    hex += "0123456789abcdef"[uint8_t(c) & 15];
                }
                return keep(std::move(hex));
            }
            default: throw Unusual{};
        }
    }

    static std::string real(double value) {
        if (std::isnan(value)) return "NaN";
        if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
        char buffer[64];
        const double size = std::fabs(value);
        if (value == 0 || (size >= 1e-4 && size < 1e16)) {
            std::string text{buffer, std::to_chars(buffer, buffer + 64, value, std::chars_format::fixed).ptr};
            return text.find('.') == std::string::npos ? text + ".0" : text;
        }
        return {buffer, std::to_chars(buffer, buffer + 64, value, std::chars_format::scientific).ptr};
    }

    int slot(Text key) const {
        for (int n = 0; n < SLOTS; ++n)
            if (key.size() == w.names[n].size() && key == w.names[n]) return n;
        return -1;
    }

    void attribute(uint8_t message, Bytes in) {
        Text key;
        Any value;
        Field f;
        int values = 0;
        while (next(in, f)) {
            if (f.number == 1) {
                key = text(f, KEY_MAX);
            } else if (f.number == 2) {
                want(f, 2);
                if (values++) throw Unusual{};
                value = any(w.message(message, 2), f.bytes);
            } else {
                check(w.kind(message, f.number), f, 0);
            }
        }
        const int n = slot(key);
        if (n >= 0) {
            if (given[n] || value.kind != (n < NUMBERS ? Any::INT : Any::STRING)) throw Unusual{};
            if (n >= NUMBERS && value.text.size() > static_cast<size_t>(w.limit[TEXT_MAX])) throw Unusual{};
            given[n] = true;
            slots[n] = value;
            return;
        }
        for (const Pair& other : rest)
            if (other.key == key) throw Unusual{};
        const Text says = shown(value);
        if (says.size() > static_cast<size_t>(w.limit[VALUE_MAX])) throw Unusual{};
        rest.push_back({key, says});
        if (rest.size() + extra.size() > static_cast<size_t>(w.limit[ATTRIBUTES_MAX])) throw Unusual{};
    }

    void begin() {
        rest.clear();
        made.clear();
        std::memset(given, 0, sizeof given);
    }

    Text chosen(Slot n, Text otherwise) const { return given[n] ? slots[n].text : otherwise; }

    void finish() {
        for (int n = 0; n < NUMBERS; ++n) out.numbers[n].push_back(given[n] ? slots[n].number : DEFAULTS[n]);
        const int64_t step = out.numbers[STEP].back();
        if (step < -1 || step > w.limit[STEP_MAX] || out.numbers[SEQUENCE].back() < -1) throw Unusual{};
        for (const Pair& pair : rest) {
            for (const Pair& other : extra)
                if (other.key == pair.key) throw Unusual{};
            put(pair);
        }
        for (const Pair& pair : extra) put(pair);
        out.map_ends.push_back(static_cast<int32_t>(out.keys.size()));
        if (++out.count > static_cast<size_t>(w.limit[RECORDS_MAX])) throw Unusual{};
    }

    void put(const Pair& pair) {
        out.keys.add(pair.key);
        out.values.add(pair.value);
        if (out.keys.bytes.size() + out.values.bytes.size() > static_cast<size_t>(w.limit[MAP_BYTES_MAX])) throw Unusual{};
    }

    void span(uint8_t message, Bytes in) {
        begin();
        Text name, trace, id;
        int64_t start = 0, end = 0;
        Field f;
        while (next(in, f)) {
            switch (f.number) {
                case 1: want(f, 2); trace = f.text(); break;
                case 2: want(f, 2); id = f.text(); break;
                case 5: name = text(f, TEXT_MAX); break;
                case 7: start = time(f); break;
                case 8: end = time(f); break;
                case 9: want(f, 2); attribute(w.message(message, 9), f.bytes); break;
                default: check(w.kind(message, f.number), f, 0);
            }
        }
        if (end < start && end != 0) throw Unusual{};
        out.kind.add(name);
        out.name.add(chosen(NAME, name));
        out.start.push_back(start);
        out.end.push_back(end);
        out.group.add(chosen(GROUP, ""));
        out.dtype.add(chosen(DTYPE, ""));
        out.trace_id.add(trace);
        out.span_id.add(id);
        finish();
    }

    void point(uint8_t message, Bytes in, Text name, Text unit) {
        begin();
        int64_t at = 0;
        double value = 0;
        Field f;
        while (next(in, f)) {
            switch (f.number) {
                case 3: at = time(f); break;
                case 4: want(f, 1); std::memcpy(&value, &f.value, 8); break;
                case 6: want(f, 1); value = static_cast<double>(static_cast<int64_t>(f.value)); break;
                case 7: want(f, 2); attribute(w.message(message, 7), f.bytes); break;
                default: check(w.kind(message, f.number), f, 0);
            }
        }
        out.name.add(name);
        out.unit.add(unit);
        out.label.add(chosen(LABEL, ""));
        out.start.push_back(at);
        out.value.push_back(value);
        finish();
    }

    void metric(uint8_t message, Bytes in) {
        Text name, unit;
        Field f, data;
        while (next(in, f)) {
            switch (f.number) {
                case 1: name = text(f, TEXT_MAX); break;
                case 3: unit = text(f, TEXT_MAX); break;
                case 5: case 7:
                    want(f, 2);
                    if (data.number) throw Unusual{};
                    data = f;
                    break;
                case 9: case 10: case 11: throw Unusual{};
                default: check(w.kind(message, f.number), f, 0);
            }
        }
        if (!data.number) return;
        const uint8_t series = w.message(message, data.number);
        while (next(data.bytes, f)) {
            if (f.number == 1) {
                want(f, 2);
                point(w.message(series, 1), f.bytes, name, unit);
            } else {
                check(w.kind(series, f.number), f, 0);
            }
        }
    }

    void record(uint8_t message, Bytes in) {
        begin();
        int64_t at = 0, observed = 0;
        Any body;
        Text name;
        int32_t severity = 0, bodies = 0;
        Field f;
        while (next(in, f)) {
            switch (f.number) {
                case 1: at = time(f); break;
                case 2: want(f, 0); severity = static_cast<int32_t>(f.value); break;
                case 5:
                    want(f, 2);
                    if (bodies++) throw Unusual{};
                    body = any(w.message(message, 5), f.bytes);
                    break;
                case 6: want(f, 2); attribute(w.message(message, 6), f.bytes); break;
                case 11: observed = time(f); break;
                case 12: name = text(f, TEXT_MAX); break;
                default: check(w.kind(message, f.number), f, 0);
            }
        }
        const Text says = body.kind == Any::NONE ? Text() : shown(body);
        if (says.size() > static_cast<size_t>(w.limit[BODY_MAX])) throw Unusual{};
        out.name.add(name.empty() ? chosen(EVENT_NAME, "") : name);
        out.start.push_back(at ? at : observed);
        out.severity.push_back(severity);
        out.body.add(says);
        finish();
    }

    void scope(uint8_t message, Bytes in) {
        Field f;
        while (next(in, f)) {
            if (f.number != 2) {
                check(w.kind(message, f.number), f, 0);
                continue;
            }
            want(f, 2);
            const uint8_t inner = w.message(message, 2);
            if (w.signal == TRACES) span(inner, f.bytes);
            else if (w.signal == METRICS) metric(inner, f.bytes);
            else record(inner, f.bytes);
        }
    }

public:
    Walk(const Walker& walker, Rows& rows) : w(walker), out(rows) {}

    // ``extras`` holds for each block (size, bytes)* pairs of keys and values: made by walker.py, not by the sender.
    void body(Bytes in, const uint8_t* const* extras, const int64_t* sizes, size_t blocks) {
        Field f, inner;
        while (next(in, f)) {
            if (f.number != 1) {
                check(w.kind(w.root, f.number), f, 0);
                continue;
            }
            want(f, 2);
            const size_t n = out.block_rows.size(), before = out.count;
            if (n >= blocks) throw Unusual{};
            extra.clear();
            Bytes packed{extras[n], extras[n] + sizes[n]};
            while (packed.at != packed.end) {
                Pair pair;
                for (Text* part : {&pair.key, &pair.value}) {
                    const size_t size = fixed<uint32_t>(packed);
                    if (size > packed.size()) throw Unusual{};
                    *part = {reinterpret_cast<const char*>(packed.at), size};
                    packed.at += size;
                }
                extra.push_back(pair);
            }
            const uint8_t block = w.message(w.root, 1);
            while (next(f.bytes, inner)) {
                if (inner.number == 1) continue;  // the resource: parsed by the caller
                if (inner.number == 2) {
                    want(inner, 2);
                    scope(w.message(block, 2), inner.bytes);
                } else {
                    check(w.kind(block, inner.number), inner, 0);
                }
            }
            out.block_rows.push_back(static_cast<int64_t>(out.count - before));
        }
    }
};

template <class T> const void* span_of(const std::vector<T>& column, int64_t* size) {
    *size = static_cast<int64_t>(column.size() * sizeof(T));
    return column.data();
}

const void* span_of(const std::string& bytes, int64_t* size) {
    *size = static_cast<int64_t>(bytes.size());
    return bytes.data();
}

}  // namespace

EXPORT void lanterne_walker_seed(uint64_t seed) { SEED = seed; }

EXPORT void* lanterne_walker_new(const uint8_t* kinds, int64_t messages, int root, int signal, const char* const* names,
                                 const int64_t* limits) {
    try {
        auto w = std::make_unique<Walker>();
        w->kinds.assign(kinds, kinds + messages * FIELDS);
        w->root = static_cast<uint8_t>(root);
        w->signal = static_cast<Signal>(signal);
        for (int n = 0; n < SLOTS; ++n) w->names[n] = names[n];
        std::memcpy(w->limit, limits, sizeof w->limit);
        return w.release();
    } catch (...) {
        return nullptr;
    }
}

// Where the resource of each block lies: (offset, size) pairs, size 0 without one. The number of blocks, or -1.
EXPORT int64_t lanterne_walker_scan(const uint8_t* body, int64_t size, int64_t* found, int64_t blocks_max) {
    try {
        Bytes in{body, body + size};
        Field f, inner;
        int64_t blocks = 0;
        while (next(in, f)) {
            if (f.number != 1) continue;
            if (f.wire != 2 || blocks == blocks_max) return -1;
            found[2 * blocks] = found[2 * blocks + 1] = 0;
            int resources = 0;
            while (next(f.bytes, inner)) {
                if (inner.number != 1) continue;
                if (inner.wire != 2 || resources++) return -1;
                found[2 * blocks] = inner.bytes.at - body;
                found[2 * blocks + 1] = static_cast<int64_t>(inner.bytes.size());
            }
            ++blocks;
        }
        return blocks;
    } catch (...) {
        return -1;
    }
}

// The rows of a body, or null when anything in it is unusual. To be given back to lanterne_rows_free.
EXPORT void* lanterne_walker_walk(const void* walker, const uint8_t* body, int64_t size, const uint8_t* const* extras,
                                  const int64_t* sizes, int64_t blocks) {
    try {
        auto rows = std::make_unique<Rows>();
        Walk(*static_cast<const Walker*>(walker), *rows).body({body, body + size}, extras, sizes, blocks);
        return rows.release();
    } catch (...) {
        return nullptr;
    }
}

EXPORT void lanterne_rows_free(void* rows) { delete static_cast<Rows*>(rows); }

// One buffer of the rows by its number in walker.py's _BUFFERS; ``size`` is set to its bytes.
EXPORT const void* lanterne_rows_buffer(const void* handle, int which, int64_t* size) {
    const Rows& r = *static_cast<const Rows*>(handle);
    if (which < NUMBERS) return span_of(r.numbers[which], size);
    const Dictionary* words[] = {&r.kind, &r.name, &r.group, &r.dtype, &r.label, &r.unit};
    const Strings* texts[] = {&r.trace_id, &r.span_id, &r.body, &r.keys, &r.values};
    which -= NUMBERS;
    if (which < 18) {
        const Dictionary& d = *words[which / 3];
        if (which % 3 == 0) return span_of(d.index, size);
        return which % 3 == 1 ? span_of(d.words.ends, size) : span_of(d.words.bytes, size);
    }
    which -= 18;
    if (which < 10) return which % 2 ? span_of(texts[which / 2]->bytes, size) : span_of(texts[which / 2]->ends, size);
    switch (which - 10) {
        case 0: return span_of(r.map_ends, size);
        case 1: return span_of(r.start, size);
        case 2: return span_of(r.end, size);
        case 3: return span_of(r.value, size);
        case 4: return span_of(r.severity, size);
        case 5: return span_of(r.block_rows, size);
        default: *size = 0; return nullptr;
    }
}
