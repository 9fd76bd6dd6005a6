// Where in a Python program an operation was issued.

#include <Python.h>

#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "order.h"
#include "trace.h"

namespace sim {

namespace {

constexpr size_t LINES = 6;  // of the program, innermost first

struct Known {
  std::string operation;
  std::vector<std::pair<PyCodeObject*, int>> lines;
};

std::mutex mutex;
std::deque<Known> sites;
std::map<std::tuple<std::string, std::vector<std::pair<PyCodeObject*, int>>>, Site> numbers;
std::unordered_map<PyCodeObject*, bool> is_ours;  // not a line of torch's or of the library's own

bool shows(PyCodeObject* code) {
  auto found = is_ours.find(code);
  if (found != is_ours.end()) return found->second;
  std::string file = PyUnicode_AsUTF8(code->co_filename) ? PyUnicode_AsUTF8(code->co_filename) : "";
  PyErr_Clear();
  bool ours = file.find("/torch/") == std::string::npos && file.find("/lib/python3") == std::string::npos &&
      file.find("<frozen") == std::string::npos;
  Py_INCREF(code);  // for ever: it is a key
  return is_ours[code] = ours;
}

std::vector<std::pair<PyCodeObject*, int>> walk() {
  std::vector<std::pair<PyCodeObject*, int>> lines;
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  while (frame != nullptr && lines.size() < LINES) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    if (shows(code)) lines.emplace_back(code, PyFrame_GetLineNumber(frame));
    Py_DECREF(code);
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  return lines;
}

Site number(const std::string& operation, std::vector<std::pair<PyCodeObject*, int>> lines) {
  std::lock_guard lock(mutex);
  auto key = std::make_tuple(operation, lines);
  auto found = numbers.find(key);
  if (found != numbers.end()) return found->second;
  sites.push_back({operation, std::move(lines)});
  return numbers[key] = static_cast<Site>(sites.size()) - 1;
}

}  // namespace

Site here(const std::string& operation) {
  if (!Py_IsInitialized()) return number(operation, {});
  count_calls_here();
  PyGILState_STATE state = PyGILState_Ensure();
  auto lines = walk();
  PyGILState_Release(state);
  return number(operation, std::move(lines));
}

Site site_of_free() {
  if (!Py_IsInitialized() || !PyGILState_Check()) return number("free", {});
  return number("free", walk());
}

std::string describe(Site site) {
  Known known;
  {
    std::lock_guard lock(mutex);
    known = sites.at(site);
  }
  std::string text = known.operation;
  PyGILState_STATE state = PyGILState_Ensure();
  bool first = true;
  for (auto& [code, line] : known.lines) {
    const char* file = PyUnicode_AsUTF8(code->co_filename);
    const char* name = PyUnicode_AsUTF8(code->co_qualname);
    text += std::string(first ? ", " : "\n       ") + (file ? file : "?") + ":" + std::to_string(line) +
        " (" + (name ? name : "?") + ")";
    first = false;
  }
  PyErr_Clear();
  PyGILState_Release(state);
  return text;
}

std::string resolve(const std::string& text) {
  std::string resolved;
  size_t begin = 0;
  for (size_t mark; (mark = text.find('\1', begin)) != std::string::npos;) {
    size_t end = text.find('\1', mark + 1);
    resolved += text.substr(begin, mark - begin) + describe(std::stoi(text.substr(mark + 1, end - mark - 1)));
    begin = end + 1;
  }
  return resolved + text.substr(begin);
}

}  // namespace sim
