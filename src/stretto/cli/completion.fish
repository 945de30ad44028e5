function __stretto
  set -l words (commandline -opc)
  set -l current (commandline -ct)
  set -l before $words[-1]
  set -l prefix ''
  if string match -q -- '--*=*' $current
    set before (string split -m 1 = -- $current)[1]
    set prefix $before=
  end
  set -l offers
  switch "$words[2] $before"
@VALUES@
  case '*'
    switch (count $words)" $words[2]"
@WORDS@
    end
  end
  string match -- "$current*" $prefix$offers
  or __fish_complete_path $current
end
complete -c stretto -f -a '(__stretto)'
